"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from autopar._version import __version__

project = "autopar"
author = copyright = "The autopar developers"
version = release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "autopar"

# docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_use_param = False  # a list of names in bold: types are in the signature
napoleon_use_ivar = True
default_role = "py:obj"
"""What single backticks are in docstrings: a link where the name is documented, else code (`linked`)."""

nitpicky = True
_TOOLS = (
    "frontend.arguments.Arguments|frontend.trace.Traced|ir.cluster.LogicalMesh|ir.degrees.Degrees|ir.graph.TensorType"
    "|ir.pipeline.PipelinePlan|ir.pipelined.PipelineOptions|ir.pipelined.Pipelined|ir.planned_step.PlannedStep"
    "|ir.program.Program|ir.sharding.Pin|ir.sharding.ShardingSpec|ir.sharding_plan.ShardingPlan"
    "|runtime.executor.Executor|step.planning.Bound|verify.programs.CompiledProgram"
)
"""Types in signatures that are for tools, and not on these pages."""
nitpick_ignore_regex = [
    ("py:obj", r".*"),
    ("py:class", r"(collections\.abc|contextlib|os|pathlib|jax|jaxlib|numpy)\..+"),  # their inventories need a network
    ("py:class", r"(autopar\.[\w.]+\.)?[PRF]"),  # type variables
    ("py:class", rf"autopar\.({_TOOLS.replace('.', '[.]')})"),
    ("py:class", r"Argnums|Loader|RayLoader|Source|StepSource"),  # aliases, and imports for type checkers alone
]
_RETURNED = (
    "autopar.Step", "autopar.checkpoint.Save", "autopar.data.Loader", "autopar.runtime.on_ray.loader.RayLoader",
    "autopar.runtime.on_ray.ray_cluster.Cluster",
)  # fmt: skip
"""Classes that functions return and nobody else makes: shown without their constructors' arguments."""


def linked(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """A name as docstrings have it, `Step.plan` or `ir.plan.Place`, where one documented name ends so; else None."""
    target: str = node.get("reftarget", "")
    if node.get("reftype") != "obj" or not ("." in target or target[:1].isupper()):
        return None
    node["refspecific"] = True
    python: Any = env.domains.python_domain
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)


def signature(_: Sphinx, what: str, name: str, _of: Any, _options: Any, text: str | None, returns: str | None) -> Any:
    """What a name is shown with: arguments and their types, and what it returns."""
    if what == "class" and name in _RETURNED:
        return "", None
    if text is not None and re.search(r"=\s?<", text):  # defaults that are no literals: a factory, an object of its own
        return re.sub(r"(=\s?)<[\w ]+>", r"\1...", text), returns
    return None


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", linked)
    app.connect("autodoc-process-signature", signature)
