"""A person at the dashboard, who opens pages and sends their forms as a browser does."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient


class Person(TestClient):
    """Opens pages and sends their forms as a browser does."""

    def see(self, address: str, status: int = 200, **query: str) -> str:
        answer = self.get(address, params=query or None, headers={"accept": "text/html"})
        assert answer.status_code == status, answer.text
        return answer.text

    def submit(self, address: str, *, status: int = 200, **fields: Any) -> str:
        """A form with the token that pages give."""
        answer = self.post(address, data={"form_token": self.form_token(), **fields}, headers=self.origin())
        assert answer.status_code == status, answer.text
        return answer.text

    def form_token(self) -> str:
        if not self.kept("celery_fdb_form"):
            self.see("/login")
        return self.kept("celery_fdb_form")

    def kept(self, name: str) -> str:
        """The cookie, which each dashboard with a token has under a name of its own; "" for none."""
        return next((each.value or "" for each in self.cookies.jar if each.name.startswith(name)), "")

    def origin(self) -> dict[str, str]:
        return {"origin": str(self.base_url), "accept": "text/html"}
