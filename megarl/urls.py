"""Addresses of HTTP services in flags."""

import urllib3
from urllib3.exceptions import HTTPError

from megarl.errors import UsageError


def check_url(flag: str, url: str):
    """UsageError naming the flag unless the URL is one of a service over http or https."""
    try:
        parsed = urllib3.util.parse_url(url)
    except HTTPError:
        parsed = urllib3.util.Url()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{flag} {url}: not an address; allowed: http://host:port/path, or https")
