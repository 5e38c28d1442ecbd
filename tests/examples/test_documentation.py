"""The documentation against the code: every key with its default, every refusal, every link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.bridge.making import arguments
from tests.examples.making import EXAMPLES, ROOT

from slime_bridge.config import KEYS, resolve_polar_slime_config
from slime_bridge.preflight import REFUSED_HOOKS, REFUSED_SWITCHES

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *EXAMPLES.rglob("*.md"), *(ROOT / "src").rglob("*.md")]
COMPUTED = ("polar_rollout_url", "polar_topology_path", "polar_task_template", "polar_max_trajectory_tokens")
"""keys whose default is no value, but words"""
ELSEWHERE = ("polar_reward_key", "polar_single_survivor")
"""keys that no attribute of the resolved settings is named after"""


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def documented() -> dict[str, str]:
    """Key to the default that the table of settings says."""
    rows = [line.split(" | ") for line in section("slime.md", "Settings").splitlines() if line.startswith("| polar_")]
    return {row[0].removeprefix("| "): row[2].strip("`") for row in rows}


def test_every_key_is_documented_and_no_other():
    assert set(documented()) == set(KEYS)


def test_documented_defaults_are_the_codes():
    config = resolve_polar_slime_config(arguments())
    for key, said in documented().items():
        if key in COMPUTED or key in ELSEWHERE:
            continue
        name = key.removeprefix("polar_")
        value = getattr(config, name) if hasattr(config, name) else getattr(config.rules, name)
        assert (None if said == "none" else said if isinstance(value, str) else yaml.safe_load(said)) == value, key


def test_the_examples_settings_are_documented():
    for path in EXAMPLES.rglob("polar.yaml"):
        assert set(yaml.safe_load(path.read_text())) <= set(KEYS), path


def test_every_refusal_is_documented():
    said = section("slime.md", "What pre-flight refuses")
    flags = {f"--{name.replace('_', '-')}" for name in REFUSED_SWITCHES | REFUSED_HOOKS}
    assert {flag for flag in flags if f"`{flag}`" not in said} == set()


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
