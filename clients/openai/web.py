"""The chat page and the page of the API: files of `clients/web`, under a policy that runs nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

_WEB = Path(__file__).resolve().parent.parent / "web"
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
# Scripts and styles are files of this server; no HTML is made from strings but by DOMPurify; nothing is loaded from or
# sent to another server.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    ]
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add(app: FastAPI) -> None:
    """`/`, `/docs` and what they load from `/web`."""
    files = {
        path.relative_to(_WEB).as_posix(): path
        for folder in (_WEB, _WEB / "vendor")
        for path in folder.iterdir()
        if path.suffix in _TYPES
    }

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_WEB / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(_WEB / "docs.html", headers=_HEADERS)

    @app.get("/web/{name:path}", include_in_schema=False)
    async def asset(name: str) -> FileResponse:
        if name not in files:
            raise HTTPException(404, "Not Found")
        path = files[name]
        return FileResponse(path, headers=_HEADERS, media_type=_TYPES[path.suffix])
