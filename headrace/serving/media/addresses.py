"""Which network addresses a server may be asked to fetch from: public ones, and those that its operator lists. A name
is resolved once; the connection goes to the address that was checked, so that a second answer of the name server
changes nothing. Refuses: connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from headrace.base.errors import MediaError
from headrace.base.media_config import MediaHosts

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL = 8192
SCHEMES = {"http": 80, "https": 443}
# Clouds answer their machines at the first two: Azure at a public address, Oracle in a network for protocols. The
# others belong to sites: IPv6 addresses of old, and those that stand for IPv4 addresses by the site's own rule.
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "fec0::/10", "64:ff9b:1::/48"))
)
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


def split_url(url: str, param: str) -> SplitResult:
    """The parts of an http or https URL; raises `MediaError` for one that another program may read differently."""
    if "://" not in url[:16]:
        raise MediaError(
            f"{param} must be an http, https or data URL; base64 is written as data:;base64,DATA", param=param
        )
    if len(url) > MAX_URL:
        raise MediaError(f"{param} is a URL of more than {MAX_URL} characters", param=param)
    if not url.isascii() or any(letter <= " " or letter in "\\\x7f" for letter in url):
        raise MediaError(f"{param} must be a URL of ASCII characters without spaces; encode others as %XX", param=param)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaError(f"{param} is no URL: {error}", param=param) from None
    if parts.scheme not in SCHEMES:
        raise MediaError(f"{param} must be an http, https or data URL, got {parts.scheme[:20]!r}", param=param)
    if not parts.hostname or port == 0:
        raise MediaError(f"{param} names no host", param=param)
    if "@" in parts.netloc:
        raise MediaError(f"{param} must hold no user name and no password", param=param)
    return parts


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet. One that stands for an IPv4 address is judged as that."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address.teredo is not None:
            inner = address.teredo[1]
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    is_special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not is_special


async def find_addresses(parts: SplitResult, hosts: MediaHosts, param: str) -> list[str]:
    """The addresses of a URL's host, all of which may be fetched from. Raises `MediaError` for a host that the list
    does not allow, or with any address that is neither public nor listed."""
    host = (parts.hostname or "").rstrip(".")
    if hosts.is_closed:
        raise MediaError(f"{param}: this server fetches no media; send them inside the request", param=param)
    has_name = hosts.is_open or hosts.has_name(host)
    if not has_name and not hosts.networks:
        raise _not_listed(host, param)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, parts.port or SCHEMES[parts.scheme], type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        raise MediaError(f"{param}: the host {host!r} cannot be found", param=param) from None
    texts = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    for address in map(ipaddress.ip_address, texts):
        is_listed = any(address in network for network in hosts.networks)
        if is_listed:
            continue
        if not has_name:
            raise _not_listed(host, param)
        if not is_public(address):
            raise MediaError(
                f"{param}: the host {host!r} has an address that is not public; the server's option "
                "--allowed-media-domains can list its network", param=param
            )
    return texts


def _not_listed(host: str, param: str) -> MediaError:
    return MediaError(
        f"{param}: this server does not fetch media from {host!r}; send the data inside the request, or have the "
        "host added to --allowed-media-domains", param=param
    )
