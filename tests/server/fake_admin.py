"""An admin service whose operations do nothing."""


class FakeAdmin:
    """Offers the operations of administrators, and does nothing."""

    async def load(self, name: str) -> int:
        return 1

    async def unload(self, name: str) -> None: ...

    def reload(self) -> None: ...
