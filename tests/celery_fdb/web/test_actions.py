"""What people do through the dashboard: asked, confirmed, done, and told in the audit."""

import html
import logging
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest

from celery_fdb.operations import action as action_module
from celery_fdb.web.request_context import carried


def boxes(page):
    return re.findall(r'name="selected" value="([^"]+)"', page)


def fields(page):
    """Of the question's form, as a browser sends it on."""
    found = {}
    for name, value in re.findall(
        r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.split("<form class")[1]
    ):
        found.setdefault(html.unescape(name), []).append(html.unescape(value))
    return found


def do(operator, **asked):
    """Asked, and confirmed."""
    return str(operator.submit("/act", **{**fields(operator.submit("/act", **asked)), **asked}))


@pytest.fixture
def deaths(app, broker):
    for number in range(3):
        app.send_task(f"shop.task{number}", queue="jobs", task_id=f"t{number}", headers={"fair_key": "acme"})
    for job in broker.queue("jobs").take_many(3, 0):
        job.bury(error="it broke, token=x1y2z3")


def test_pause_and_resume_a_queue_and_a_key(operator, broker, caplog):
    jobs = broker.queue("jobs")
    jobs.put("a", key="acme")
    with caplog.at_level(logging.INFO, "celery_fdb.audit"):
        page = operator.submit("/act", action="pause", queue="jobs", back="/queue?queue=jobs")
    assert jobs.control().paused
    assert "Paused jobs." in page
    assert "<h1>jobs</h1>" in page
    assert caplog.messages == ["anybody on jobs: Pause (jobs): begun.", "anybody on jobs: Paused jobs."]
    assert "Paused jobs." not in operator.see("/queue", queue="jobs"), "told once"
    operator.submit("/act", action="resume", queue="jobs")
    operator.submit("/act", action="pause", queue="jobs", key="acme", back="/keys?queue=jobs")
    assert not jobs.control().paused
    assert jobs.limits("acme").paused


def test_cancel_what_is_selected(operator, app, broker):
    for number in range(3):
        app.send_task("shop.pay", queue="jobs", task_id=f"t{number}")
    spots = boxes(operator.see("/messages", queue="jobs"))
    question = operator.submit("/act", action="cancel", queue="jobs", selected=spots[:2])
    assert "Delete 2 messages of jobs for good?" in question
    assert "shop.pay t0" in question
    assert broker.queue("jobs").count() == 3, "asked only"
    page = operator.submit("/act", action="cancel", **fields(question) | {"selected": spots[:2]})
    assert "Cancelled 2 messages of jobs" in page
    assert broker.queue("jobs").count() == 1


def test_dead_letters_by_cause_lead_to_their_letters(operator, deaths):
    assert "jobs.dead" in operator.see("/dead")
    page = operator.see("/dead", queue="jobs.dead")
    assert page.count("rejected") >= 3
    assert page.count('value="replay_all"') == 4, "of each cause, and of the queue"
    link = re.search(r'href="(/messages\?[^"]*task1[^"]*)"', page)
    letters = operator.see(html.unescape(link[1]))
    assert len(boxes(letters)) == 1
    letter = re.search(r'href="(/message\?[^"]*)"', letters)
    for each in (page, letters, operator.see(html.unescape(letter[1]))):
        assert ("it broke, token=" in each, "x1y2z3" in each) == (True, False)


def test_a_cause_is_replayed_in_all_queues(operator, broker, deaths):
    broker.queue("other").put("x")
    broker.queue("other").take(0).bury(error="broke")
    assert "/causes" in operator.see("/dead")
    page = operator.see("/causes")
    assert page.count('value="replay_everywhere"') == 4
    form = next(each for each in page.split("<form method") if "shop.task1" in each and "replay_everywhere" in each)
    sent = {name: html.unescape(value) for name, value in re.findall(r'name="([^"]+)" value="([^"]*)"', form)}
    question = operator.submit("/act", **sent)
    asked = "Replay 1 dead letter of all queues that match task='shop.task1'"
    assert asked in html.unescape(question)
    assert "Replayed 1 dead letter" in operator.submit("/act", **fields(question), action="replay_everywhere")
    assert "of all queues, by cause" in operator.see("/causes")
    assert (broker.queue("jobs").count(), broker.queue("jobs.dead").count()) == (1, 2)


def test_messages_are_filtered_and_paged(visit, app, broker):
    for number in range(7):
        app.send_task("shop.pay" if number % 2 else "shop.mail", queue="jobs", task_id=f"id{number}")
    person = visit(page_size=2)
    seen = []
    address = "/messages?queue=jobs&task=shop.mail"
    while address:
        page = person.see(address)
        seen += re.findall(r"<code>(id\d)</code>", page)
        following = re.search(r'href="([^"]*after=[^"]*)">Next', page)
        address = html.unescape(following[1]) if following else ""
    assert seen == ["id0", "id2", "id4", "id6"]
    assert "Nothing matches" in person.see("/messages", queue="jobs", task="nobody.*")
    assert "must be a date" in person.see("/messages", 422, queue="jobs", since="yesterday")


def test_what_waits_to_be_retried_is_found_by_its_last_error(operator, app):
    attempts = [{"time": "2031-05-05T12:00:00.000+00:00", "error": "shop.errors.Declined: no cover"}]
    app.send_task("shop.pay", queue="jobs", task_id="again", countdown=60, headers={"fdb_attempts": attempts})
    app.send_task("shop.pay", queue="jobs", task_id="first", countdown=60)
    page = operator.see("/messages", queue="jobs", state="delayed", error="Declined")
    assert re.findall(r"<code>(again|first)</code>", page) == ["again"]
    assert "<td>Declined</td>" in page
    assert "no cover" not in page, "the class alone"
    assert re.findall(
        r"<code>(again|first)</code>", operator.see("/messages", queue="jobs", state="delayed", error="-")
    ) == ["first"]


def test_a_message_shows_its_body_only_if_that_is_allowed_and_asked_for(visit, app):
    masked = {"x-api-token": "x1y2z3", "inner": {"password": "x1y2z3"}}
    arguments = {"args": ("a secret",), "kwargs": {"name": "a secret"}}
    app.send_task("shop.pay", **arguments, queue="jobs", task_id="t", headers=masked, correlation_id="token=x1y2z3")
    person, allowed = visit(), visit(show_bodies=True)
    link = re.search(r'href="(/message\?[^"]+)"', person.see("/messages", queue="jobs"))
    address = html.unescape(link[1])
    for page in (person.see(address), person.see(f"{address}&body=1"), allowed.see(address)):
        assert "shop.pay" in page
        assert "a secret" not in page
        assert ("x-api-token" in page, "token=" in page, "x1y2z3" in page) == (True, True, False)
    page = allowed.see(f"{address}&body=1")
    assert ("a secret" in page, "x1y2z3" in page) == (True, False)


def test_messages_are_found_by_their_arguments_if_those_may_be_seen(visit, app, broker):
    """To other visitors, neither a page nor the number in a question reveals them."""
    app.send_task("shop.pay", args=("Acme",), kwargs={"order": 7}, queue="jobs", task_id="first")
    app.send_task("shop.pay", args=("globex",), queue="jobs", task_id="other")
    blind, allowed = visit(read_only=False), visit(read_only=False, show_bodies=True)
    for text in ("acme", "'order': 7"):
        page = allowed.see("/messages", queue="jobs", arguments=text)
        assert re.findall(r"<code>(first|other)</code>", page) == ["first"]
        assert "Delete 1 ready message" in allowed.see("/act", action="cancel_all", queue="jobs", arguments=text)
    assert "Arguments contain" not in blind.see("/messages", queue="jobs")
    assert "hidden" in blind.see("/messages", 404, queue="jobs", arguments="acme")
    assert "hidden" in blind.see("/act", 403, action="cancel_all", queue="jobs", arguments="acme")


def choices(page, kind):
    found = re.search(rf'<datalist id="known-{kind}">(.*?)</datalist>', page)
    assert f'list="known-{kind}"' in page
    return [html.unescape(each) for each in re.findall(r'value="([^"]*)"', found[1])]


def mail():
    """A task of the app's."""


def test_names_are_completed(operator, app, broker):
    """Tasks of the app and of the page, keys of the queue, and queues."""
    app.task(mail, name="shop.mail")
    app.send_task("shop.pay", queue="jobs", headers={"fair_key": "acme"})
    broker.queue("jobs").put("x", key="globex\x00")
    page = operator.see("/messages", queue="jobs")
    assert {"shop.mail", "shop.pay"} <= {*choices(page, "task")}
    assert choices(page, "key") == ["acme"]
    assert choices(operator.see("/act", action="publish", queue="jobs"), "task").count("shop.mail") == 1
    broker.queue("jobs\n").put("x")  # an input would make it another queue
    assert choices(operator.see("/act", action="move", queue="jobs"), "queue") == ["jobs"]


def test_a_task_is_found_by_its_id(viewer, app):
    app.send_task("shop.pay", queue="jobs", task_id="t1")
    assert "shop.pay" in viewer.see("/task", id=" t1 ")
    assert "Nothing is known about this task" in viewer.see("/task", id="t2")


def test_keys_by_their_beginning_in_pages(visit, broker):
    for number in range(5):
        broker.queue("jobs").put("x", key=f"eu/{number}")
    broker.queue("jobs").put("x", key="us/1")
    person = visit(page_size=2)
    page = person.see("/keys", queue="jobs", prefix="eu/")
    assert ("eu/0" in page, "eu/2" in page, "us/1" in page) == (True, False, False)
    following = re.search(r'href="([^"]*after=[^"]*)">Next', page)
    assert "eu/2" in person.see(html.unescape(following[1]))


def test_the_filter_and_the_page_stay_through_an_action(visit, broker):
    """Of the list, and from a message's own page back to it."""
    person = visit(read_only=False, show_bodies=True, page_size=2)
    for number in range(5):
        broker.queue("jobs").put(str(number), key="acme", delay=600)
    page = person.see("/messages", queue="jobs", state="delayed", key="acme")
    following = re.search(r'href="([^"]+)">Next page', page)
    address = html.unescape(following[1])
    page = person.see(address)
    ways = {html.unescape(each) for each in re.findall(r'name="back" value="([^"]+)"', page)}
    assert {frozenset(parse_qsl(urlsplit(each).query)) for each in ways} == {
        frozenset(parse_qsl(urlsplit(address).query))
    }
    link = re.search(r'<th scope="row"><a href="(/message\?[^"]+)"', page)
    on_its_page = person.see(html.unescape(link[1]))
    assert ways == {html.unescape(each) for each in re.findall(r'name="back" value="([^"]+)"', on_its_page)}
    assert "evil" not in person.see(html.unescape(link[1]).partition("&back=")[0] + "&back=//evil.example")


def test_a_question_has_an_address_for_back_reload_and_bookmarks(operator, app, broker):
    """Of what was selected, too, with names that no browser sends as they are."""
    name = "jobs\r\n\0"
    for number in range(50):
        app.send_task("shop.pay", queue="jobs", task_id=f"t{number}")
        broker.queue(name).put(str(number), delay=600)
    for queue, state, action in (("jobs", "ready", "cancel"), (name, "delayed", "reschedule")):
        page = broker.queue(queue).page(50, state=state)
        spots = [str(each.spot) for each in page.messages]
        (quoted, value) = carried("queue", queue)
        sent = {
            "form_token": operator.form_token(),
            "action": action,
            quoted: value,
            "selected": spots,
            "back": "/dead",
        }
        asked = operator.post("/act", data=sent, headers=operator.origin(), follow_redirects=False)
        assert asked.status_code == 303
        address = asked.headers["location"]
        assert operator.form_token() not in address
        question = operator.see(address)
        assert boxes(question) == spots
        assert fields(question) == fields(operator.see(address)), "again"
        given = {**fields(question), "due": "2041-05-05T12:00"} | {"selected": spots, "action": action}
        assert "50 messages" in operator.submit("/act", **given)
    assert operator.get(address, headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}).status_code == 403
    assert "There is no such message" in operator.see("/act", 404, action="cancel", queue="jobs", packed="AAAA")


def test_a_question_with_too_long_an_address_is_shown_at_once(operator, broker):
    sent = {
        "form_token": operator.form_token(),
        "action": "purge",
        "queue": "jobs",
        "back": "/queue?queue=" + "x" * 5000,
    }
    answer = operator.post("/act", data=sent, headers=operator.origin(), follow_redirects=False)
    assert answer.status_code == 200
    assert "Delete 0 waiting messages of jobs" in answer.text


def test_fields_of_any_name_lead_to_the_question(operator):
    question = operator.submit("/act", action="purge", queue="jobs", page="1", root="/elsewhere", template="x")
    assert "Delete 0 waiting messages of jobs" in question


# -- who may not -------------------------------------------------------------------------------------------------------


def test_a_dashboard_that_only_shows_has_no_buttons_and_refuses(viewer, broker, deaths):
    letter = re.search(r'href="(/message\?[^"]*)"', viewer.see("/messages?queue=jobs.dead"))
    assert letter is not None
    for address in (
        *("/queue?queue=jobs", "/messages?queue=jobs.dead", "/dead?queue=jobs.dead", "/keys?queue=jobs"),
        html.unescape(letter[1]),
    ):
        page = viewer.see(address)
        assert 'name="action"' not in page
        assert 'type="checkbox" name="selected"' not in page
    assert "is read-only" in viewer.see("/queues"), "and how to change that"
    assert "is read-only" in viewer.submit("/act", action="pause", queue="jobs", status=403)
    assert not broker.queue("jobs").control().paused


def test_a_user_who_may_not_act_does_not(visit, broker):
    from celery_fdb.web import User

    person = visit(user=lambda _: User("eve", may_act=False, may_see_bodies=False), read_only=False, show_bodies=True)
    broker.queue("jobs").put("x")
    assert 'name="action"' not in person.see("/queue", queue="jobs")
    person.submit("/act", action="pause", queue="jobs", status=403)
    assert not broker.queue("jobs").control().paused


def test_an_action_needs_a_post_and_its_token(operator, broker):
    broker.queue("jobs").put("x")
    operator.form_token()
    assert "Stop delivering" in operator.see("/act", action="pause", queue="jobs", confirmed="yes"), "a question only"
    answer = operator.post("/act", data={"action": "pause", "queue": "jobs"}, headers=operator.origin())
    assert answer.status_code == 403
    assert not broker.queue("jobs").control().paused


@pytest.mark.parametrize("given", [{}, {"action": "nonsense"}, {"action": "replay", "selected": "x"}])
def test_an_action_without_what_it_needs_changes_nothing(operator, given):
    assert "There is no such" in operator.submit("/act", status=404, queue="jobs", **given)


def test_an_action_on_nothing_selected_says_so(operator, broker):
    broker.queue("jobs").put("x")
    page = operator.submit("/act", action="cancel", queue="jobs", back="/messages?queue=jobs")
    assert "Select messages first." in page
    assert broker.queue("jobs").count() == 1


def test_the_way_back_stays_here(operator):
    fields = {"action": "pause", "queue": "jobs", "back": "//evil.example/", "form_token": operator.form_token()}
    answer = operator.post("/act", data=fields, headers=operator.origin(), follow_redirects=False)
    assert answer.headers["location"] == "/"


# -- actions with forms ------------------------------------------------------------------------------------------------


def test_limits_are_shown_and_set_by_a_form(operator, broker):
    broker.queue("jobs").put("x", key="acme")
    broker.queue("jobs").limit("acme", rate=2.5)
    question = operator.submit("/act", action="limit", queue="jobs", key="acme")
    assert 'name="rate" value="2.5/s"' in question
    given = {"action": "limit", "queue": "jobs", "key": "acme", "confirmed": "yes", "back": "/keys?queue=jobs"}
    page = operator.submit("/act", status=422, **given, rate="fast")
    assert "is not a rate" in page
    assert 'value="fast"' in page, "what was typed stays"
    assert "weight 3" in operator.submit("/act", **given, rate="100/m", weight="3")
    limits = broker.queue("jobs").limits("acme")
    assert (limits.weight, round(limits.rate or 0, 3)) == (3, 1.667)


def test_an_unknown_name_of_a_task_is_said_before_it_is_published(operator, broker, app, monkeypatch):
    """On the question, which is the form; and it is published if that is meant so."""
    answers = {"w@test": ["shop.pay"]}
    monkeypatch.setattr(app.control, "inspect", lambda timeout: SimpleNamespace(registered=lambda: answers))
    broker.declare("jobs")
    given = {"action": "publish", "queue": "jobs", "task": "shop.typo", "confirmed": "yes"}
    page = operator.submit("/act", status=422, **given)
    said = "No worker that answered knows a task shop.typo"
    assert page.count(said) == 2, "the question, and what comes back with it; the error tells what to do"
    assert said in operator.see("/act", action="publish", queue="jobs", task="shop.typo")
    assert not broker.queue("jobs").count()
    asked = re.search(r'name="asked" value="([^"]+)"', page)
    assert "Published shop.typo" in operator.submit("/act", **given, asked=html.unescape(asked[1]))
    assert "Published shop.pay" in operator.submit("/act", **{**given, "task": "shop.pay"})


def test_a_queue_is_moved_purged_and_deleted(operator, broker):
    broker.queue("jobs").put_many("abc")
    broker.queue("other").put("x")
    assert '<option value="other">' in operator.submit("/act", action="move", queue="jobs")
    do(operator, action="move", queue="jobs", target="other")
    assert broker.queue("other").count() == 4
    operator.submit("/act", action="purge", queue="other", confirmed="yes")
    assert broker.queue("other").count() == 4, "the question was not asked"
    do(operator, action="purge", queue="other")
    assert broker.queue("other").count() == 0
    page = do(operator, action="delete_queue", queue="other", back="/queues")
    assert "Deleted" in page
    assert "other" not in broker.queues()


def test_a_question_is_put_anew_if_it_is_about_others_now(operator, broker, deaths):
    question = operator.submit("/act", action="discard_all", queue="jobs.dead")
    assert "Delete 3 dead letters of jobs.dead for good?" in question
    broker.dead_letters("jobs.dead").discard(1)
    anew = operator.submit("/act", status=422, action="discard_all", **fields(question))
    assert "nothing was changed (asked: 3, gone: 1, still there: 2)" in anew
    assert "Delete 2 dead letters of jobs.dead for good?" in anew
    assert broker.queue("jobs.dead").count() == 2
    assert "Discarded 2 dead letters" in operator.submit("/act", action="discard_all", **fields(anew))


def test_arguments_are_edited_by_those_who_may_see_them(visit, app, broker):
    app.send_task("shop.pay", args=("acme",), queue="jobs", task_id="t")
    broker.queue("jobs").take(0).bury()
    blind, operator = visit(read_only=False), visit(app=app, read_only=False, show_bodies=True)
    page = blind.see("/messages", queue="jobs.dead")
    assert "Edit and replay" not in page
    assert "Edit and replay" not in blind.see("/task", id="t")
    (spot,) = boxes(page)
    given = {"action": "edit", "queue": "jobs.dead", "selected": spot}
    assert "acme" not in blind.submit("/act", status=403, **given)
    assert "&#34;acme&#34;" in operator.submit("/act", **given)
    operator.submit("/act", **given, args='["globex"]', kwargs="{}", confirmed="yes")
    found = broker.queue("jobs").peek()[0]
    assert b"globex" in found.payload


def test_a_waiting_message_is_rescheduled_by_a_form(operator, app, broker):
    app.send_task("shop.pay", queue="jobs")
    (spot,) = boxes(operator.see("/messages", queue="jobs"))
    question = operator.submit("/act", action="reschedule", queue="jobs", selected=spot)
    assert "Due, <span data-zone>UTC</span> (required)" in question
    picker = re.search(r'name="due" value="([^"]+)"[^>]*type="datetime-local"', question)
    begins_with = datetime.fromisoformat(picker[1]).replace(tzinfo=UTC)
    assert begins_with.second == 0
    assert timedelta(0) < begins_with - datetime.now(UTC) <= timedelta(hours=1)
    given = {**fields(question), "action": "reschedule"}
    assert "this is no date and time" in operator.submit("/act", status=422, **given, due="sometime")
    assert "to 2041-05-05 12:00:00 UTC: shop.pay" in operator.submit("/act", **given, due="2041-05-05T12:00")
    counts = broker.queue("jobs").stats()
    assert (counts.ready, counts.delayed) == (0, 1)
    assert "2041-05-05" in operator.see(
        "/message", queue="jobs", spot=boxes(operator.see("/messages", queue="jobs", state="delayed"))[0]
    )


# -- never on more than was asked for ----------------------------------------------------------------------------------


def test_cancel_all_of_the_page_of_the_delayed_leaves_the_ready(operator, app, broker):
    for number in range(3):
        app.send_task("shop.now", queue="jobs", task_id=f"now{number}")
        app.send_task("shop.later", queue="jobs", task_id=f"later{number}", countdown=3600)
    page = operator.see("/messages", queue="jobs", state="delayed")
    forms = [each for each in page.split("<form method") if 'value="cancel_all"' in each]
    sent = {name: html.unescape(value) for name, value in re.findall(r'name="([^"]+)" value="([^"]*)"', forms[0])}
    question = operator.submit("/act", **sent)
    assert "Delete 3 delayed messages of jobs for good?" in question
    done = operator.submit("/act", action="cancel_all", **fields(question))
    assert "Cancelled 3 delayed messages of jobs" in done
    counts = broker.queue("jobs").stats()
    assert (counts.ready, counts.delayed) == (3, 0)


ODD = ["a\x00b", "a\nb", "a\r\nb", "\rx\n", "\u202e", "100%25", "%00", "x.quoted", " ", ""]


def as_a_browser_sends(value):
    return re.sub("\r\n|\r|\n", "\r\n", value.replace("\x00", "\ufffd"))


@pytest.mark.parametrize("name", ODD)
def test_a_form_leads_to_the_queue_and_the_key_that_it_is_about(operator, broker, name):
    """Browsers can't send every text; and a name that is another one in a form may be that of another queue."""
    queue, others = broker.queue(name), {as_a_browser_sends(name), f"{name}x"} - {name}
    for each in (name, *others):
        broker.queue(each).put("a", key=name or "k")
    page = operator.see("/keys", queue=name)
    form = next(each for each in page.split("<form ") if 'value="pause"' in each)
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form)
    operator.submit("/act", action="pause", **{k: as_a_browser_sends(html.unescape(v)) for k, v in found})
    assert queue.limits(name or "k").paused
    question = operator.submit("/act", action="purge", queue=name)
    sent = {each: [as_a_browser_sends(value) for value in values] for each, values in fields(question).items()}
    operator.submit("/act", action="purge", **sent)
    assert queue.count() == 0
    assert [broker.queue(each).count() for each in others] == [1] * len(others)


def test_what_is_quoted_wrongly_is_a_page(operator):
    for value in ("%ff", "%", "%ed%a0%80", "%zz"):
        assert operator.post(
            "/act", data={"form_token": operator.form_token(), "action": "purge", "queue.quoted": value}
        ).status_code in {200, 422}


def test_an_action_on_one_key_goes_on_with_that_key(operator, broker, monkeypatch):
    monkeypatch.setattr("kombu_fdb.engine.messages.move.MESSAGES_PER_TRANSACTION", 2)
    monkeypatch.setattr(action_module, "MOST_PARTS", 1)
    for key in ("acme", "other"):
        for _ in range(5):
            broker.queue("jobs").put("a", key=key)
    broker.queue("third").put("a")
    page = do(operator, action="move", queue="jobs", key="acme", target="third")
    assert "part by part" in page
    while "Go on" in page:
        page = operator.submit("/act", **fields(page))
    assert {key: each.ready for key, each in broker.queue("jobs").keys().items()} == {"other": 5}


def test_a_key_is_not_purged_by_an_action_on_the_whole_queue(operator, broker):
    for key in ("acme", "other"):
        broker.queue("jobs").put("a", key=key)
    assert "not for one key" in operator.submit("/act", status=422, action="purge", queue="jobs", key="acme")
    page = operator.submit("/act", action="purge", queue="jobs", key="acme", confirmed="yes")
    assert "not for one key" in page
    assert broker.queue("jobs").count() == 2


def test_the_audit_does_not_repeat_arguments_that_were_refused(operator, broker, caplog):
    broker.queue("jobs").put("a")
    with caplog.at_level(logging.INFO, "celery_fdb.audit"):
        for args in ('{"card": "4111-2222"}', '["4111-2222"', '"4111-2222"'):
            operator.submit("/act", status=422, action="publish", queue="jobs", task="t", args=args, confirmed="yes")
    assert sum("args must be" in each for each in caplog.messages) == 3
    assert "4111" not in caplog.text


def test_a_name_does_not_turn_the_question_around(operator, broker):
    """Written from right to left, a question would ask for something else than what is done."""
    name = "jobs\u202e\u2066x"
    broker.queue(name).put("a")
    question = operator.submit("/act", action="purge", queue=name)
    asked = re.findall("<p>(.*?)</p>", question)
    assert asked[0].startswith("Delete 1 waiting message of jobs\\u202e\\u2066x for good?")
    assert (
        "\u202e"
        not in re.findall("<p class=.notice.*?</p>", operator.submit("/act", **fields(question), action="purge"))[0]
    )
    assert broker.queue(name).count() == 0
