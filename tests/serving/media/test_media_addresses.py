"""Which hosts media may be fetched from: public ones, and those that the operator lists."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from headrace.base.errors import ConfigError, MediaError
from headrace.base.media_config import MediaConfig, MediaHosts
from headrace.serving.media.addresses import find_addresses, is_public, split_url

PRIVATE = (
    "127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "0.0.0.0", "224.0.0.1", "255.255.255.255", "168.63.129.16", "192.0.0.192",
    "::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "fec0::1", "64:ff9b:1::a00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:0a00:0001::1",
)


@pytest.mark.parametrize("text", PRIVATE)
def test_what_is_not_the_public_internet(text):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "93.184.216.34", "2606:4700::6810:84e5", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_what_is(text):
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("url", [
    "http://127.0.0.1/a.png", "http://localhost:8000/", "http://[::1]/", "http://2130706433/", "http://0x7f.1/",
    "http://127.1/", "http://169.254.169.254/latest/meta-data/", "http://[::ffff:10.0.0.1]/", "http://0/",
])
async def test_every_spelling_of_a_private_address_is_refused(url):
    with pytest.raises(MediaError, match="not public") as caught:
        await find_addresses(split_url(url, "here"), MediaHosts(), "here")
    assert caught.value.param == "here" and caught.value.status == 400


@pytest.mark.parametrize("url", [
    "ftp://example.org/a", "gopher://example.org/", "http://", "http:///a", "http://user:word@example.org/",
    "http://user@127.0.0.1/", "http://example.org\\@127.0.0.1/", "http://exa mple.org/",
    "http://example.org/\r\nHost: x",
    "http://example.org:99999/", "http://[::1/", "http://ex\u00e4mple.org/", "javascript:alert(1)",
    "http://example.org/" + "a" * 9000,
])
def test_strange_addresses_are_refused(url):
    with pytest.raises(MediaError):
        split_url(url, "here")


def resolver(monkeypatch, *addresses: str) -> list[str]:
    """Lets every name resolve to these; returns the names that were asked for."""
    asked: list[str] = []

    async def resolve(self, host, port, **options):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    return asked


async def test_one_private_address_among_public_ones_is_too_many(monkeypatch):
    resolver(monkeypatch, "93.184.216.34", "10.0.0.7")
    with pytest.raises(MediaError, match="not public"):
        await find_addresses(split_url("http://rebind.example/", "here"), MediaHosts(), "here")


async def test_lists_of_hosts(monkeypatch):
    asked = resolver(monkeypatch, "93.184.216.34")
    hosts = MediaHosts.parse("images.example.org, *.cdn.example.net")
    for url in ("https://images.example.org/a", "http://IMAGES.example.org./a", "https://x.y.cdn.example.net/"):
        assert await find_addresses(split_url(url, "here"), hosts, "here") == ["93.184.216.34"]
    asked.clear()
    for url in ("https://example.org/", "https://images.example.org.evil.com/", "https://cdn.example.net/"):
        with pytest.raises(MediaError, match="--allowed-media-domains"):
            await find_addresses(split_url(url, "here"), hosts, "here")
    assert not asked, "a host that is not allowed is not even looked up"


async def test_a_listed_name_may_still_not_be_private_but_a_listed_network_may(monkeypatch):
    resolver(monkeypatch, "10.0.0.7")
    url = split_url("http://store.internal/", "here")
    with pytest.raises(MediaError, match="not public"):
        await find_addresses(url, MediaHosts.parse("store.internal"), "here")
    assert await find_addresses(url, MediaHosts.parse("10.0.0.0/8"), "here") == ["10.0.0.7"]
    assert await find_addresses(url, MediaHosts.parse("store.internal,10.0.0.7"), "here") == ["10.0.0.7"]
    with pytest.raises(MediaError, match="does not fetch"):
        await find_addresses(url, MediaHosts.parse("192.168.0.0/16"), "here")
    with pytest.raises(MediaError, match="fetches no media"):
        await find_addresses(url, MediaHosts.parse("none"), "here")


@pytest.mark.parametrize("options, message", [
    ({"allowed_media_domains": "http://example.org"}, "host names"),
    ({"allowed_media_domains": "exa mple"}, "host names"),
    ({"limit_mm_per_prompt": "image=4"}, "no JSON"),
    ({"limit_mm_per_prompt": '{"images": 4}'}, "image, video, audio"),
    ({"limit_mm_per_prompt": '{"image": -1}'}, "from 0"),
    ({"limit_mm_per_prompt": '{"image": true}'}, "from 0"),
    ({"media_timeout_s": 0}, "at least|from"),
])
def test_options_are_checked_at_the_start(options, message):
    with pytest.raises(ConfigError, match=message):
        MediaConfig(**options)


def test_limits_have_defaults_of_their_own():
    config = MediaConfig(limit_mm_per_prompt='{"image": 3}')
    assert (config.limit("image"), config.limit("video"), config.limit("audio")) == (3, 4, 16)
