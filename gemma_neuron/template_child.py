"""The child process that renders a chat template: a template is code from the checkpoint.

Run as `python -m gemma_neuron.template_child`. One JSON request a line on stdin, one JSON answer a line
on stdout; ends when stdin does, so it never outlives its parent. Before the first template it gives up
memory past `MEMORY_BYTES`, new file descriptors and file writes. What jinja2 sees is what transformers
gives it: trim_blocks, lstrip_blocks, loop controls, tojson, raise_exception, strftime_now, and a
`generation` block that renders its body.

    {"op": "load", "source": "…"}           -> {"ok": true}
    {"op": "render", "values": {…}}         -> {"text": "…"}
    failure                                 -> {"error": "…", "kind": "raised" | "template" | "limit"}
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from datetime import datetime
from typing import Any

# Imported before the limits bite: jinja2 imports its traceback rewriter only when a template fails.
import jinja2
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 256 * 1024 * 1024
OUTPUT_BYTES = 1024 * 1024
CPU_SECONDS = 2
"""Per request and whole seconds, because that is what RLIMIT_CPU counts; the parent's clock gives it longer."""


OTHER_FILES = (
    jinja2.nodes.Include,
    jinja2.nodes.Import,
    jinja2.nodes.FromImport,
    jinja2.nodes.Extends,
)


class RaisedByTemplate(jinja2.exceptions.TemplateError):
    """`raise_exception(text)`: the template refuses the conversation."""


class OutputTooLong(Exception):
    """The rendered text passed OUTPUT_BYTES."""


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateDict:
    """`dict` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` without underscore names, which lead to Python's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _refuse_private(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not store {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &; models were trained on text without that.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox that transformers' `apply_chat_template` compiles templates in."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=TemplateDict(),
        namespace=TemplateNamespace,
    )
    return env


def limit_process() -> None:
    """Memory, no new descriptors, no file writes. CPU time is renewed for each request."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def _renew_cpu_time() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_SECONDS, hard))


def _render(template: jinja2.Template, values: dict[str, Any]) -> str:
    pieces, size = [], 0
    for piece in template.generate(**values):
        size += len(piece.encode("utf-8", "replace"))
        if size > OUTPUT_BYTES:
            raise OutputTooLong
        pieces.append(piece)
    return "".join(pieces)


def answer(
    request: dict[str, Any], env: ImmutableSandboxedEnvironment, loaded: list[jinja2.Template]
) -> dict[str, Any]:
    """Do one request; `loaded` holds the template between requests."""
    try:
        if request["op"] == "load":
            refuse_escapes(env.parse(request["source"]))
            loaded[:] = [env.from_string(request["source"])]
            return {"ok": True}
        return {"text": _render(loaded[0], request["values"])}
    except RaisedByTemplate as error:
        return {"error": str(error), "kind": "raised"}
    except OutputTooLong:
        return {"error": f"its output is longer than {OUTPUT_BYTES} bytes", "kind": "limit"}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES} bytes of memory", "kind": "limit"}
    except RecursionError:
        return {"error": "it nests too deeply", "kind": "limit"}
    except (
        Exception
    ) as error:  # any failure of the template's code is its own, and is reported as such
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        return {"error": f"{type(error).__name__}: {error}{place}", "kind": "template"}


def refuse_escapes(tree: jinja2.nodes.Template) -> None:
    """Raise SecurityError for what no chat template needs, in any branch: it would fail only when reached."""
    for node in tree.find_all(
        (jinja2.nodes.Getattr, jinja2.nodes.Getitem, jinja2.nodes.Filter, *OTHER_FILES)
    ):
        if isinstance(node, OTHER_FILES):
            raise SecurityError(f"line {node.lineno} is unsafe: it loads another template")
        name: object = None
        if isinstance(node, jinja2.nodes.Getattr):
            name = node.attr
        elif isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
            name = node.arg.value
        elif isinstance(node, jinja2.nodes.Filter) and node.name == "attr" and node.args:
            name = getattr(node.args[0], "value", None)
        if isinstance(name, str) and name.startswith("__"):
            raise SecurityError(
                f"line {node.lineno} is unsafe: {name!r} leads to Python's internals"
            )


def _warm_up(env: ImmutableSandboxedEnvironment) -> None:
    """Use once what Python imports on first use: codecs, number parsing, the traceback rewriter."""
    env.from_string(
        "{{ 'a\\u00e9' ~ 1.5 ~ strftime_now('%d %b %Y') ~ {'k': 'é'}|tojson }}"
    ).render()
    for source in ("{% if %}", "{{ raise_exception('x') }}", "{{ a.b.c }}"):
        with contextlib.suppress(jinja2.exceptions.TemplateError):
            env.from_string(source).render()


def main() -> None:
    """Answer requests until stdin ends."""
    env = environment()
    _warm_up(env)
    limit_process()
    loaded: list[jinja2.Template] = []
    for line in sys.stdin.buffer:
        _renew_cpu_time()
        reply = json.dumps(answer(json.loads(line), env, loaded))
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
