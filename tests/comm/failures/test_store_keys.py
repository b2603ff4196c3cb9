"""Keys of past runs leave the store, others stay."""

import torch.distributed as dist

from lightning_hetero.comm.failures.store_keys import forget_keys
from tests.helpers import free_port


def test_only_keys_with_the_prefix_go():
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True)
    for key in ("run/1/a", "run/1/b", "run/12/a", "other"):
        store.set(key, "")
    forget_keys(store, "run/1/")
    assert not any(store.check([key]) for key in ("run/1/a", "run/1/b"))
    assert all(store.check([key]) for key in ("run/12/a", "other"))


def test_a_store_that_lists_no_keys_keeps_them():
    class Old:
        """A store of an older torch."""

    forget_keys(Old(), "run/")
