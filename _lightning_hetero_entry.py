"""Entry point that torch calls on ``import torch``: it registers the strategies' names, and never fails.

An editable installation leaves its entry point behind when its checkout is moved or deleted, and ``import torch`` fails
if an entry point cannot be imported. So even an editable installation copies this file into the environment
(``setup.py``), and the file checks whether the rest is still there.
"""

import logging

__all__ = ["boot"]


def boot() -> None:
    """Call ``_lightning_hetero_autoload.boot``; without it, say what is missing and what to do."""
    try:
        from _lightning_hetero_autoload import boot as enter_names
    except ImportError as error:
        logging.getLogger("lightning_hetero").warning(
            "lightning-hetero is installed from a folder where it no longer is (%s): its names are not known. Install "
            "it from where it is now (pip install -e FOLDER), or remove it (pip uninstall lightning-hetero).",
            error,
        )
        return
    enter_names()
