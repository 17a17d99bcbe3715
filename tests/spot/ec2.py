"""What moto lacks of EC2, between the toolkit and moto's server: capacity, prices, quota, refusals, lost answers.

Requests that EC2 would refuse by script are answered with its own error documents; what it would grant goes to moto,
which then has the instance. CreateFleet is answered twice with the same result when it comes twice with the same
token, as EC2 does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

from tests.loopback import passed_on, serving

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
IMAGE = "ami-0123456789abcdef0"
STATUS = {
    "RequestLimitExceeded": 503,
    "InternalError": 500,
    "Unavailable": 503,
    "UnauthorizedOperation": 403,
}
MESSAGES = {
    "InsufficientInstanceCapacity": "There is no Spot capacity available that matches your request.",
    "UnfulfillableCapacity": "Unable to fulfill capacity due to your request configuration. Please adjust your "
    "request.",
    "MaxSpotInstanceCountExceeded": "Max spot instance count exceeded",
    "VcpuLimitExceeded": "You have requested more vCPU capacity than your current vCPU limit of 0 allows.",
    "UnauthorizedOperation": "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/x "
    "is not authorized to perform: ec2:CreateFleet. Encoded authorization failure message: "
    + "x"
    * 200,
    "RequestLimitExceeded": "Request limit exceeded.",
    "InternalError": "An internal error has occurred.",
    "SpotMaxPriceTooLow": "Your Spot request price is lower than the minimum required Spot request fulfillment price.",
    "Unsupported": "Your requested instance type is not supported in your requested Availability Zone.",
}
"""Code → text, as EC2 gives them."""


@dataclass
class Ec2:
    """The script. `capacity`: zones that have it. `refusal`: what the others answer, by zone (default: none left).

    `whole`: region → codes that whole CreateFleet requests there are refused with, one each. `lose`: how many
    CreateFleet answers get lost after the launch, by a cut connection or, with `hang`, by silence.
    `hidden`: DescribeInstances calls from now on that show nothing yet. `prices`, `quota`: by zone, by region.
    `refused`: action → code for every such call, in `refused_regions` or all.
    """

    upstream: str
    address: str = ""
    capacity: set[str] = field(default_factory=set)
    on_demand: set[str] = field(default_factory=set)
    refusal: dict[str, str] = field(default_factory=dict)
    whole: dict[str, list[str]] = field(default_factory=dict)
    lose: int = 0
    hang: float = 0.0
    hidden: int = 0
    prices: dict[str, float] = field(default_factory=dict)
    quota: int = 9600
    refused: dict[str, str] = field(default_factory=dict)
    refused_regions: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)
    """Regions without any subnet."""
    appears: tuple[int, str] | None = None
    """(rounds, zone): capacity there once each region was asked that often."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(region, action) of each request."""
    launches: list[dict[str, Any]] = field(default_factory=list)
    """What was passed on to be launched."""
    fleets: list[dict[str, Any]] = field(default_factory=list)
    """Each CreateFleet as it came: region, pools, fields."""
    answers: dict[str, bytes] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def count(self, action: str) -> int:
        return sum(found == action for _, found in self.asked)

    def times_asked(self, region: str) -> int:
        return sum(fleet["region"] == region for fleet in self.fleets)


def document(code: str, message: str = "") -> bytes:
    text = escape(message or MESSAGES.get(code, code))
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error>'
        f"<Code>{code}</Code><Message>{text}</Message></Error></Errors>"
        "<RequestID>3e9fe392-f4a6-4499-8c1b-54e5c903a0ba</RequestID></Response>"
    ).encode()


def fleet_refusals(rows: list[tuple[dict[str, str], str]], lifecycle: str) -> bytes:
    """An instant fleet that launched nothing: an error for each override, in an answer of status 200."""
    items = "".join(
        "<item><launchTemplateAndOverrides><launchTemplateSpecification>"
        "<launchTemplateId>lt-1</launchTemplateId><version>1</version></launchTemplateSpecification><overrides>"
        f"<instanceType>{pool['InstanceType']}</instanceType><subnetId>{pool['SubnetId']}</subnetId>"
        f"<availabilityZone>{pool['zone']}</availabilityZone></overrides></launchTemplateAndOverrides>"
        f"<lifecycle>{lifecycle}</lifecycle><errorCode>{code}</errorCode>"
        f"<errorMessage>{escape(MESSAGES.get(code, code))}</errorMessage></item>"
        for pool, code in rows
    )
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<CreateFleetResponse xmlns="{NAMESPACE}">'
        "<requestId>b0a4c6a5-7d8c-4a6c-9b1e-000000000000</requestId><fleetId>fleet-1</fleetId>"
        f"<errorSet>{items}</errorSet><fleetInstanceSet/></CreateFleetResponse>"
    ).encode()


def overrides(fields: dict[str, str]) -> list[dict[str, str]]:
    """The pools of a CreateFleet request, in its order."""
    prefix = "LaunchTemplateConfigs.1.Overrides."
    found: dict[int, dict[str, str]] = {}
    for name, value in fields.items():
        if name.startswith(prefix):
            index, _, key = name.removeprefix(prefix).partition(".")
            found.setdefault(int(index), {})[key] = value
    return [found[index] for index in sorted(found)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ec2: Ec2
    zones: dict[str, str]

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        region = self.headers.get("Authorization", "").partition("Credential=")[2].split("/")[2:3]
        target = self.headers.get("X-Amz-Target", "").partition(".")[2]
        fields = {} if target else dict(parse_qsl(body.decode(), keep_blank_values=True))
        action = target or fields.get("Action", "")
        where = region[0] if region else ""
        with self.ec2.lock:
            self.ec2.asked.append((where, action))
            answered = self._scripted(where, action, fields, body)
        if answered is not None:
            self._send(*answered)

    def do_GET(self) -> None:
        self._send(*self._upstream(b""))

    do_HEAD = do_PUT = do_DELETE = do_GET

    def _scripted(
        self, region: str, action: str, fields: dict[str, str], body: bytes
    ) -> tuple[int, bytes, str] | None:
        ec2, dry = self.ec2, fields.get("DryRun") == "true"
        if action in ec2.refused and region in (ec2.refused_regions or {region}):
            return self._refuse(ec2.refused[action])
        if action == "CreateFleet" and not dry:
            return self._fleet(region, fields)
        if action == "DescribeInstances" and ec2.hidden > 0:
            ec2.hidden -= 1
            return 200, answer_of(action, "<reservationSet/>"), "text/xml"
        if action == "DescribeSubnets" and region in ec2.bare:
            return 200, answer_of(action, "<subnetSet/>"), "text/xml"
        own: dict[str, Callable[[], bytes]] = {
            "GetServiceQuota": lambda: json.dumps({"Quota": {"Value": float(ec2.quota)}}).encode(),
            "GetParameter": lambda: json.dumps(
                {"Parameter": {"Name": "x", "Value": IMAGE}}
            ).encode(),
            "GetProducts": _price_list,
            "DescribeImages": lambda: answer_of(action, IMAGES),
            "DescribeSpotPriceHistory": lambda: self._prices(region),
            "GetSpotPlacementScores": lambda: answer_of(action, SCORES),
        }
        if action not in own:
            return self._upstream(body)
        kind = "application/x-amz-json-1.1" if self.headers.get("X-Amz-Target") else "text/xml"
        return 200, own[action](), kind

    def _refuse(self, code: str) -> tuple[int, bytes, str]:
        if self.headers.get("X-Amz-Target"):
            return (
                400,
                json.dumps({"__type": code, "message": code}).encode(),
                "application/x-amz-json-1.1",
            )
        return STATUS.get(code, 400), document(code), "text/xml"

    def _fleet(self, region: str, fields: dict[str, str]) -> tuple[int, bytes, str] | None:
        """One request for a box, by the script; None when its answer is lost."""
        ec2 = self.ec2
        token = fields["ClientToken"]
        spot = fields["TargetCapacitySpecification.DefaultTargetCapacityType"] == "spot"
        if token in ec2.answers:
            return 200, ec2.answers[token], "text/xml"
        pools = overrides(fields)
        for pool in pools:
            pool["zone"] = self._zone_of(region, pool["SubnetId"])
        ec2.fleets.append({"region": region, "pools": pools, "fields": fields, "spot": spot})
        if ec2.whole.get(region):
            return self._refuse(ec2.whole[region].pop(0))
        if ec2.appears is not None and ec2.times_asked(ec2.appears[1][:-1]) > ec2.appears[0]:
            ec2.capacity.add(ec2.appears[1])
        having = ec2.capacity if spot else ec2.on_demand
        good = [pool for pool in pools if pool["zone"] in having and self._pays(pool)]
        if not good:
            rows = [(pool, self._why(pool, having)) for pool in pools]
            lifecycle = "spot" if spot else "on-demand"
            ec2.answers[token] = fleet_refusals(rows, lifecycle)
            return 200, ec2.answers[token], "text/xml"
        chosen = good[0]
        ec2.launches.append({"region": region, "pool": chosen, "fields": fields})
        prefix = "LaunchTemplateConfigs.1.Overrides."
        kept = {k: v for k, v in fields.items() if not k.startswith(prefix)}
        kept |= {f"{prefix}1.{key}": chosen[key] for key in ("InstanceType", "SubnetId")}
        status, data, kind = self._upstream(urlencode(kept).encode())
        ec2.answers[token] = data
        if ec2.lose > 0:
            ec2.lose -= 1
            if ec2.hang:
                time.sleep(ec2.hang)
            self.close_connection = True
            return None
        return status, data, kind

    def _pays(self, pool: dict[str, str]) -> bool:
        return float(pool.get("MaxPrice", "inf")) >= self.ec2.prices.get(pool["zone"], 0.0)

    def _why(self, pool: dict[str, str], having: set[str]) -> str:
        if pool["zone"] in having:
            return "SpotMaxPriceTooLow"
        return self.ec2.refusal.get(pool["zone"], "InsufficientInstanceCapacity")

    def _zone_of(self, region: str, subnet: str) -> str:
        if subnet not in self.zones:
            wanted = {
                "Action": "DescribeSubnets",
                "Version": "2016-11-15",
                "SubnetId.1": subnet,
            }
            _, data, _ = self._upstream(urlencode(wanted).encode())
            self.zones[subnet] = data.decode().partition("<availabilityZone>")[2].partition("<")[0]
        return self.zones[subnet]

    def _prices(self, region: str) -> bytes:
        rows = "".join(
            "<item><instanceType>inf2.24xlarge</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{price:.6f}</spotPrice><timestamp>2026-01-31T12:00:00.000Z</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone></item>"
            for zone, price in self.ec2.prices.items()
            if zone.startswith(region)
        )
        body = f"<spotPriceHistorySet>{rows}</spotPriceHistorySet><nextToken/>"
        return answer_of("DescribeSpotPriceHistory", body)

    def _upstream(self, body: bytes) -> tuple[int, bytes, str]:
        answer = passed_on(self, self.ec2.upstream, body)
        kind = dict(answer.headers).get("Content-Type") or "text/xml"
        return answer.status, answer.data, kind

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def answer_of(action: str, body: str) -> bytes:
    return f'<{action}Response xmlns="{NAMESPACE}">{body}</{action}Response>'.encode()


def _price_list() -> bytes:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": "6.4900"}}
    entry = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": dimension}}}}}
    return json.dumps({"PriceList": [json.dumps(entry)]}).encode()


IMAGES = (
    f"<imagesSet><item><imageId>{IMAGE}</imageId><architecture>x86_64</architecture>"
    "<rootDeviceName>/dev/sda1</rootDeviceName><blockDeviceMapping><item><deviceName>/dev/sda1</deviceName>"
    "<ebs><volumeSize>100</volumeSize></ebs></item></blockDeviceMapping></item></imagesSet>"
)
SCORES = (
    "<spotPlacementScoreSet><item><region>us-east-1</region><availabilityZoneId>use1-az6</availabilityZoneId>"
    "<score>3</score></item></spotPlacementScoreSet>"
)


@contextmanager
def scripted(upstream: str) -> Iterator[Ec2]:
    """The proxy, running."""
    ec2 = Ec2(upstream)
    with serving(_Handler, ec2=ec2, zones={}) as port:
        ec2.address = f"http://127.0.0.1:{port}"
        yield ec2
