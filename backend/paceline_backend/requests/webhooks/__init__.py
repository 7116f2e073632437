"""Webhooks: bodies, signatures, permitted addresses, and the request itself.

Signatures follow Standard Webhooks (https://www.standardwebhooks.com), for which receivers have
libraries: `webhook-id`, `webhook-timestamp` and `webhook-signature`, which is `v1,` followed by the
Base64 of HMAC-SHA256 over "id.timestamp.body". The worker's sender and the API's test call `post`::

    sent = post(url, body_of("raised", alert, at), "msg_7", key, allowed)
"""

from paceline_backend.requests.webhooks.addresses import AddressError, address_of
from paceline_backend.requests.webhooks.sending import (
    Sent,
    body_of,
    delivery_id,
    post,
    secret_text,
    signature,
)

__all__ = [
    "AddressError",
    "Sent",
    "address_of",
    "body_of",
    "delivery_id",
    "post",
    "secret_text",
    "signature",
]
