"""Hundreds of wrong values for every key of a recipe, and files that are none: one line that names the key, exit 2."""

import random
from typing import Any

import pytest
import typer
from helpers import within

from grpo_train import cli
from grpo_train.recipes import Recipe

WRONG = [
    *("many", "", "null", "true", "-3", "0", "2.5", "1e400", "99999999999999999999", ".nan", ".inf", "-.inf", "1e-400"),
    *(
        "[]",
        "[1]",
        "[a, b]",
        "{}",
        "{a: 1}",
        "[[]]",
        "~",
        "\t",
        "../..",
        "a b",
        "é",
        "0x10",
        "2026-01-01",
        "'",
        "*x",
        "&a b",
    ),
    *("[" * 500, "x" * 10_000, "{{}}", "!!python/object:os.system x", "- a", "? b", "%", "@"),
]
# What PyYAML's own constructors end with a ValueError, a KeyError or an AttributeError for.
BAD_SCALARS = [
    *("2001-99-99", "2001-01-01T99:00:00Z", "0x_", "0b_", "0o_", "!!int x", "!!float x", "!!bool maybe"),
    *("!!timestamp x", "9" * 5000, "-" + "9" * 5000, "{a: 1, a: 2}"),
]


def unknown_keys(count: int) -> bytes:
    return "".join(f"k{number}: 1\n" for number in range(count)).encode()


def nested_merges() -> bytes:
    """Eleven mappings, each of which merges the one before twelve times."""
    lines = ["k0: &k0 {a: 1}"]
    for n in range(1, 12):
        before = ", ".join([f"*k{n - 1}"] * 12)
        lines.append(f"k{n}: &k{n} {{<<: [{before}], b{n}: 1}}")
    return "\n".join([*lines, ""]).encode()


FILES = {f"scalar {value[:20]}": f"name: tiny\nseed: {value}\n".encode() for value in BAD_SCALARS}
FILES |= {
    "120,000 unknown keys": unknown_keys(120_000),
    "12,000 unknown keys": unknown_keys(12_000),
    "merge keys, nested": nested_merges(),
    "empty": b"",
    "binary": bytes(range(256)),
    "not utf-8": "name: é".encode("latin-1"),
    "a list": b"- a\n- b\n",
    "a number": b"3\n",
    "two documents": b"name: a\n---\nname: b\n",
    "an alias of itself": b"a: &a [*a]\n",
    "cut": b"name: tiny\nmodel: {path: ",
    "no model": b"name: x\nseed: 1\n",
    "keys that are no text": b"1: 2\nnull: 3\n[a]: b\n",
}


def leaves(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key of the recipe and every section, as section.key."""
    found = []
    for name, field in schema["properties"].items():
        found.append(prefix + name)
        for part in (field, *field.get("anyOf", []), *field.get("oneOf", [])):
            if "$ref" in part:
                found += leaves(definitions[part["$ref"].rpartition("/")[2]], definitions, f"{prefix}{name}.")
    return found


def assert_accepted_or_one_line(done, key: str) -> bool:
    assert "Traceback" not in done.stderr, (key, done.stderr[-500:])
    if done.returncode == 0:
        return False
    assert done.returncode == 2, (key, done.stderr)
    assert done.stderr.startswith("error: "), (key, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1, (key, done.stderr)
    assert len(done.stderr) < 2000, (key, len(done.stderr))
    # A size that does not fit others is named with them.
    assert any(part in done.stderr for part in (*key.split("."), "training.", "grpo.")), (key, done.stderr)
    return True


def test_a_wrong_value_of_any_key_is_one_line_that_names_it(grpo, tmp_path, monkeypatch):
    schema = Recipe.model_json_schema()
    keys = leaves(schema, schema["$defs"])
    assert len(keys) > 80
    pairs = [(key, value) for key in keys for value in WRONG]
    refused = 0
    for key, value in random.Random(20261126).sample(pairs, 500):
        done = grpo("config", "recipes/tiny-cpu.yaml", f"{key}={value}")
        refused += assert_accepted_or_one_line(done, key)
    assert refused >= 300


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_is_no_recipe_is_one_line_that_names_it(grpo, tmp_path, content):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    with within(10):
        done = grpo("train", file, "--runs", tmp_path / "runs")
    assert assert_accepted_or_one_line(done, "recipe.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("value", BAD_SCALARS, ids=lambda value: value[:20])
def test_a_scalar_that_yaml_cannot_construct_is_one_line(grpo, value):
    done = grpo("config", "recipes/tiny-cpu.yaml", f"seed={value}")
    assert assert_accepted_or_one_line(done, "seed")


def test_a_device_without_an_end_is_no_recipe(grpo):
    assert assert_accepted_or_one_line(grpo("config", "/dev/zero"), "/dev/zero")


OF_A_RECIPE = ["recipes/tiny-cpu.yaml", "seed=many"]
COMMANDS = {
    "config": ["config", *OF_A_RECIPE],
    "convert": ["convert", *OF_A_RECIPE],
    "train": ["train", *OF_A_RECIPE],
    "evaluate": ["evaluate", *OF_A_RECIPE],
    "report": ["report", "no-such-run"],
    "compare": ["compare", "no-such-run", "nor-this"],
}


def test_a_wrong_value_of_any_flag_is_one_line_and_leaves_nothing(grpo, root):
    """The commands are refused for what else they are given, if not for the flag: nothing is computed."""
    commands = typer.main.get_command(cli.command_line()).commands
    chosen = []
    for name in COMMANDS:
        options = [option for parameter in commands[name].params for option in parameter.opts]
        flags = [option for option in options if option.startswith("-")]
        chosen += [(name, flag, value) for flag in flags for value in WRONG]
    before = sorted(root.iterdir())
    for name, option, value in random.Random(20261126).sample(chosen, 300):
        done = grpo(*COMMANDS[name], option, value)
        given = (name, option, value, done.stderr[-500:])
        assert done.returncode == 2, given
        assert "Traceback" not in done.stderr, given
        assert len(done.stderr.strip().splitlines()) == 1, given
        assert done.stderr.startswith("error: "), given
    assert sorted(root.iterdir()) == before
