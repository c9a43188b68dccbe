"""Shared storage: a folder or an S3 bucket behind one small protocol that counts what it does."""

from dure.storage.access import Access
from dure.storage.layout import Layout
from dure.storage.open import open_store
from dure.storage.protocol import Store

__all__ = ["Access", "Layout", "Store", "open_store"]
