"""Spot instances: what is offered where, and a box taken the moment there is one. Imports boto3; buys only when told.

`scan` looks, `poller` waits, `fleet` asks, `boxes` finds those of ours; `template` and `user_data` say what a box is.
"""
