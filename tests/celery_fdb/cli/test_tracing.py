"""OpenTelemetry's context passes through our messages: with its own Celery instrumentation, and with plain Kombu."""

import threading

import pytest
from celery.contrib.testing.worker import start_worker
from kombu import Connection
from kombu.simple import SimpleQueue
from opentelemetry import propagate, trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*")

DEADLINE_S = 60.0


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield provider.get_tracer("test")
    instrumentor.uninstrument()
    provider.shutdown()


@pytest.fixture
def app(url, new_app):
    app = new_app(url)
    app.conf.update(task_ignore_result=True, broker_transport_options={"sweep_interval": 0.2})
    return app


def spans(exporter, name):
    return [each for each in exporter.get_finished_spans() if each.name == name]


def test_a_task_its_delay_and_its_retries_are_in_the_trace_of_its_caller(app, tracer, exporter):
    done = threading.Event()

    @app.task(bind=True, name="flaky", max_retries=2, shared=False)
    def flaky(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0.05)
        with tracer.start_as_current_span("inner"):
            pass
        done.set()

    with (
        tracer.start_as_current_span("request") as caller,
        start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=DEADLINE_S),
    ):
        flaky.apply_async(countdown=0.1)
        assert done.wait(DEADLINE_S)
    (inner,) = spans(exporter, "inner")
    assert inner.context.trace_id == caller.get_span_context().trace_id
    runs, sends = spans(exporter, "run/flaky"), spans(exporter, "apply_async/flaky")
    assert len(runs) == len(sends) == 3, "each attempt has a span"
    assert {each.context.trace_id for each in runs + sends} == {caller.get_span_context().trace_id}
    parents = {each.context.span_id for each in sends}
    assert {each.parent.span_id for each in runs} == parents, "each run is the child of what published it"


def test_the_context_is_on_a_dead_letter_that_was_replayed(app, tracer, exporter, broker):
    @app.task(name="later", shared=False)
    def later():
        pass

    with tracer.start_as_current_span("request") as caller:
        later.delay()
    queue = broker.queue("celery")
    queue.take(0).bury()
    queue.dead_letters.replay()
    with app.connection() as connection:
        message = connection.default_channel.basic_get("celery", no_ack=True)
    context = trace.get_current_span(propagate.extract(message.headers)).get_span_context()
    assert context.trace_id == caller.get_span_context().trace_id


def test_plain_kombu_carries_it_in_the_headers(url, tracer):
    with Connection(url) as connection, tracer.start_as_current_span("request") as caller:
        headers = {}
        propagate.inject(headers)
        queue = SimpleQueue(connection, "orders")
        queue.put({"order": 1}, headers=headers)
        message = queue.get(timeout=DEADLINE_S)
        with tracer.start_as_current_span("handle", context=propagate.extract(message.headers)) as span:
            message.ack()
        assert span.parent.span_id == caller.get_span_context().span_id
        queue.close()
