"""Requests made up from the server's own OpenAPI schema: whatever comes, it is answered, and never with a 5xx."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from shared.server import make_app
from tests.tiny import ScriptedEngine

app = make_app(ScriptedEngine("ab 😀"))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_is_answered_with_a_server_error(case):
    case.call_and_validate(checks=[not_a_server_error])
