"""Sphinx settings of the documentation: Markdown pages, a gallery and a notebook that run, and the reference.

The build needs no network: mathematics is typeset by a copy of MathJax in the pages, and links into the documentation
of torch and others are made only on Read the Docs or with ``DOCS_INTERSPHINX=1``.
"""

import inspect
import os
import runpy
from pathlib import Path

from sphinx.ext import autosummary

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy, HeteroFSDPStrategy, __version__

HERE = Path(__file__).parent

project = "lightning-hetero"
author = "the lightning-hetero authors"
copyright = author  # noqa: A001
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/*", "examples/*.ipynb", "examples/*.py"]
templates_path = ["_templates"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autosummary_context = {"described": runpy.run_path(str(HERE / "members.py"))["MEMBERS"]}
# After these, a full stop does not end the first sentence of a description.
ABBREVIATIONS = ("eq.", "sec.", "Alg.")
autosummary.WELL_KNOWN_ABBREVIATIONS += ABBREVIATIONS
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

online = os.environ.get("DOCS_INTERSPHINX") == "1" or os.environ.get("READTHEDOCS") == "True"
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
}
intersphinx_mapping = intersphinx_mapping if online else {}

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": r"/plot_",
    "image_scrapers": ("matplotlib",),
    "within_subsection_order": "FileNameSortKey",
    "show_memory": False,
    "min_reported_time": 1e6,
    "plot_gallery": "True",
    "abort_on_example_error": True,
    "write_computation_times": False,
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"lightning-hetero {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
    "source_repository": "https://github.com/lightning-hetero/lightning-hetero/",
    "source_branch": "main",
    "source_directory": "docs/",
}

FULL = (HeteroDDPStrategy, HeteroElasticStrategy, HeteroFSDPStrategy)


def describe_fully(app, what, name, obj, options, lines):
    """Give a strategy the description of the base that has its arguments, which is the same for both Lightnings."""
    if what == "class" and obj in FULL:
        lines[:] = inspect.getdoc(obj.__mro__[1]).splitlines()


def setup(app):
    """Connect what is above; before napoleon reads the docstrings."""
    app.connect("autodoc-process-docstring", describe_fully, priority=100)
