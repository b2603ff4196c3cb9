"""What torch calls on ``import torch``: enter the strategies' names, and never fail.

An editable installation leaves its entry point behind when its checkout is moved or deleted, and torch makes an entry
point that cannot be imported a failure of ``import torch`` itself. So this file is copied into the environment, also by
an editable installation (``setup.py``), and finds out whether the rest is still there.
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
