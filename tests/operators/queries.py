"""The Prometheus queries of examples/operators, and the series and labels that each query reads."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

EXAMPLES = Path(__file__).parents[2] / "examples" / "operators"

Labels = Mapping[str, str]
Series = Mapping[str, Sequence[Labels]]  # name -> label sets of its series

OF_THE_SCRAPE = ("job", "instance")  # labels that Prometheus adds to every series that it scrapes
JOB = {"job": "redline", "instance": "127.0.0.1:8000"}

TOKEN = re.compile(r"""\s+|"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[A-Za-z_:][\w:]*|\d[\d.]*|=~|!~|[=!<>]=|.""")
GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}


class Asked(NamedTuple):
    """A query of a panel or of an alert, with the labels that its legend or its annotations use."""

    where: str
    query: str
    told: frozenset[str]


class Selector(NamedTuple):
    """A metric's name, and the conditions on its labels: (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


class Read(NamedTuple):
    """The series that a query reads. groups: labels that it sums by, each with the metric that must have it."""

    selectors: tuple[Selector, ...]
    groups: frozenset[tuple[str, str]]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, except headings."""
    return [one for one in json.loads((EXAMPLES / "grafana.json").read_text())["panels"] if one["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    """The alerts."""
    return [rule for group in document("alerts.yml")["groups"] for rule in group["rules"]]


def document(name: str) -> Any:
    """A YAML file of the examples."""
    return yaml.safe_load((EXAMPLES / name).read_text())


def asked() -> Iterator[Asked]:
    """Every query."""
    for panel in panels():
        for target in panel["targets"]:
            legend = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            yield Asked(f"{panel['title']}, {target['refId']}", target["expr"], legend)
    for rule in rules():
        labels = frozenset(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        yield Asked(rule["alert"], rule["expr"], labels)


def series(exposed: str) -> Series:
    """The series of a scrape of /metrics, and `up`, which Prometheus adds."""
    found: dict[str, list[Labels]] = {"up": [JOB]}
    for family in text_string_to_metric_families(exposed):
        for sample in family.samples:
            found.setdefault(sample.name, []).append({**sample.labels, **JOB})
    return found


def wrong(one: Asked, given: Series) -> list[str]:
    """The parts of a query that no series of `given` matches: a line for each."""
    read = reads(one.query)
    found: list[str] = []
    for name, matchers in read.selectors:
        if name not in given:
            found.append(f"{name}: no such series")
        elif not any(all(_holds(labels, *matcher) for matcher in matchers) for labels in given[name]):
            found.append(f"{name}: none with {matchers}")
    named = {label for label, _ in read.groups}
    for label, name in read.groups:
        if name in given and label not in given[name][0]:
            found.append(f"{name}: has no label {label}")
    shown = named or {label for name, _ in read.selectors for labels in given.get(name, ()) for label in labels}
    found += [f"the result has no label {label}" for label in one.told - shown]
    return found


def _holds(labels: Labels, label: str, operator: str, value: str) -> bool:
    """Matching as in Prometheus, except that a missing label matches nothing, since it is a mistake of the example."""
    if label not in labels:
        return False
    if value == "$instance":
        return True
    same = re.fullmatch(value, labels[label]) is not None if operator[-1] == "~" else labels[label] == value
    return same != (operator[0] == "!")


def reads(query: str) -> Read:
    """The metrics of a PromQL query and the labels that it sums by. Expects `sum by (label)(...)`, in this order.

    Raises AssertionError for unsupported syntax.
    """
    tokens = [token for token in TOKEN.findall(query) if not token.isspace()]
    selectors: list[Selector] = []
    groups: set[tuple[str, str]] = set()
    at = 0
    while at < len(tokens):
        token, after = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        at += 1
        if token in GROUPING:
            assert token == "by", f"{token}: not supported"
            assert (after, tokens[at - 2] == ")") == ("(", False), "write sum by (label)(...)"
            end = tokens.index(")", at)
            names = [name for name in tokens[at + 1 : end] if name != ","]
            body = tokens[end + 1 : _closing(tokens, end + 1) + 1]
            groups |= {(label, of.name) for label in names for of in reads(" ".join(body)).selectors}
            at = end + 1
        elif not re.match(r"[A-Za-z_:]", token) or token in OPERATORS or after in ("(", "by"):
            continue
        elif after == "{":
            end = tokens.index("}", at)
            matchers = tokens[at + 1 : end]
            assert not set(matchers[3::4]) - {","}, matchers
            parts = zip(matchers[::4], matchers[1::4], matchers[2::4], strict=True)
            selectors.append(Selector(token, tuple((label, how, json.loads(value)) for label, how, value in parts)))
            at = end + 1
        else:
            selectors.append(Selector(token, ()))
    return Read(tuple(selectors), frozenset(groups))


def _closing(tokens: Sequence[str], start: int) -> int:
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at] == "(") - (tokens[at] == ")")
        if not depth:
            return at
    raise AssertionError(f"no end of {' '.join(tokens[start:])}")
