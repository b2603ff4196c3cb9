"""Keys in the job's store that no rank reads any more."""

from contextlib import suppress

import torch.distributed as dist

__all__ = ["forget_keys"]


def forget_keys(store: dist.Store, prefix: str) -> None:
    """Delete the keys that begin so, which no rank reads any more; a store that cannot list its keys keeps them.

    Example:
        >>> store = dist.HashStore()
        >>> store.set("run 1/a", ""), store.set("run 2/a", "")
        (None, None)
        >>> forget_keys(store, "run 1/")
        >>> store.num_keys()
        1
    """
    with suppress(AttributeError, RuntimeError):  # an older torch; a store that is gone
        for key in store.list_keys():  # type: ignore[attr-defined]
            if key.startswith(prefix):
                store.delete_key(key)
