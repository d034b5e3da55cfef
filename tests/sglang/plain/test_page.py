"""The page of a real server in a real browser: it shows a kill and the rejoin, and works while ranks die."""

from __future__ import annotations

import pytest

from eep.drill.faults import Target
from eep.drill.sglang_server import Server
from tests.sglang.browser import Browser

pytestmark = pytest.mark.timeout(300)

STATES = "return [...document.querySelectorAll('.tile')].map(tile => tile.dataset.state)"
ALL_READY = f"{STATES}.filter(state => state === 'ready').length === 4"
TILE = "const tile = document.querySelector('.tile[data-rank=\"1\"]'); "
LIFE = f"{TILE} return Number(tile.dataset.life)"
BACK = f"{TILE} return tile.dataset.state === 'ready' && tile.dataset.life > arguments[0]"
PRESS = f"{TILE} [...tile.querySelectorAll('button')].find(each => each.textContent === arguments[0]).click()"
WATCH = """
window.shown = [];
const look = () => shown.push(document.querySelector('.tile[data-rank="1"]')?.dataset.state);
new MutationObserver(look).observe(document.getElementById('tiles'), {childList: true});
"""


def test_the_page_shows_a_kill_and_the_rejoin_without_a_complaint(plain: Server) -> None:
    assert plain.directory is not None
    target = Target(plain.directory)
    with Browser() as browser:
        plain.generate("Say 1")
        browser.open(f"{plain.url}/eep/")
        browser.wait_for(ALL_READY)
        browser.wait_for("return document.getElementById('phase').textContent === 'RUN'")
        browser.wait_for("return JSON.parse(document.getElementById('experts').dataset.counts ?? '{}')[1] > 0")
        browser.wait_for("return document.querySelectorAll('#events div').length > 3")
        life = browser.run(LIFE)
        browser.run(WATCH)
        target.kill(1)
        browser.wait_for("return shown.some(state => state && state !== 'ready')")
        browser.wait_for(BACK, life)
        browser.wait_for(ALL_READY)
        assert "rank 1 is dying" in browser.run("return document.getElementById('events').textContent")
        browser.wait_for("return document.getElementById('change').textContent.startsWith('rank 1 joined: ')")
        assert browser.complaints() == []


def test_a_button_of_the_page_changes_the_instance(plain: Server) -> None:
    with Browser() as browser:
        plain.generate("Say 1")
        browser.open(f"{plain.url}/eep/")
        browser.wait_for(ALL_READY)
        life = browser.run(LIFE)
        browser.run(PRESS, "replace")
        browser.wait_for(BACK, life, within=60)
        browser.wait_for("return document.getElementById('answer').textContent.includes('done')")
        assert browser.complaints() == []
