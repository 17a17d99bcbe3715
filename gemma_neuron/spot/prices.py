"""What an instance costs on demand, from AWS's price list; None where it cannot be had."""

from __future__ import annotations

import json
from typing import Any

from gemma_neuron.spot.account import GLOBAL_REGION, Account
from gemma_neuron.spot.offers import Pool
from gemma_neuron.spot.refusals import Refused, asking


def on_demand_price(account: Account, region: str, type_: str) -> float | None:
    """US dollars an hour for Linux on shared hardware."""
    wanted = {
        "regionCode": region,
        "instanceType": type_,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()
    ]
    try:
        with asking(GLOBAL_REGION, "pricing:GetProducts"):
            client = account.client("pricing", GLOBAL_REGION)
            answer = client.get_products(ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)
    except Refused:
        return None
    found = [price for text in answer["PriceList"] for price in _dollars(text)]
    return min(found) if found else None


def affordable(account: Account, pool: Pool, cap: float | None) -> bool:
    """Whether a box there may be bought on demand: EC2 keeps no cap then, so an unknown price is over every cap."""
    if cap is None:
        return True
    price = on_demand_price(account, pool.region, pool.type)
    return price is not None and price <= cap


def _dollars(text: str) -> list[float]:
    """Hourly prices in one entry of the list, a document of its own."""
    found = []
    try:
        entry: dict[str, Any] = json.loads(text)
        for term in entry["terms"]["OnDemand"].values():
            for dimension in term["priceDimensions"].values():
                amount = float(dimension["pricePerUnit"]["USD"])
                if dimension.get("unit") == "Hrs" and amount > 0:
                    found.append(amount)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return found
