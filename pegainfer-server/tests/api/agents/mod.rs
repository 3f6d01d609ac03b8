//! Requests recorded from coding agents, replayed over HTTP against a scripted engine: the first turn, a tool call, its
//! result and the final answer, streamed and whole, with every format of tool calls.

mod answer;
mod cases;
mod recorded;
mod scripted;
mod template;

use crate::support::client::{post_ok, send};
use crate::support::mock::{Control, MockEngine};
use crate::support::{Setup, TestServer};
use answer::Answer;
use recorded::Recorded;
use scripted::Reply;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use template::Template;

/// Context length of the scripted engine, larger than every recorded prompt plus its `max_tokens`.
const CONTEXT: usize = 262_144;

/// The server of one template, and its scripted engine.
struct Agents {
    server: TestServer,
    control: Arc<Control>,
    template: Template,
}

impl Agents {
    fn start(template: Template) -> Self {
        let (engine, control) = MockEngine::replying("unscripted");
        let engine = engine.with_max_model_len(CONTEXT);
        let names = ["agent", "gpt-5.5"].map(String::from).to_vec();
        let setup = Setup { names, model_dir: template.dir().to_path_buf(), ..Setup::default() };
        Self { server: TestServer::start(engine, setup), control, template }
    }

    /// Sends a body as this client would, and expects an answer.
    fn ask(&self, recorded: &Recorded, body: &Value, reply: &Reply) -> Answer {
        let (format, reply) = (self.template.format(), reply.clone());
        self.control.script(move |prompt| reply.text(format, prompt));
        let headers: Vec<(&str, &str)> = recorded.headers.iter().map(|(name, value)| (&**name, &**value)).collect();
        let response = send(self.server.address, "POST", &recorded.path, &headers, body.to_string().as_bytes());
        let status = response.status;
        let text = response.text();
        assert_eq!(status, 200, "{} with {:?}: {text}", recorded.name, self.template);
        if body["stream"] == true {
            Answer::from_stream(recorded.api(), &text)
        } else {
            Answer::from_response(recorded.api(), &text)
        }
    }

    /// The reply that the client should see: reasoning only if the prompt left the model free to reason.
    fn expected(&self, reply: &Reply) -> Reply {
        let mut expected = reply.clone();
        if self.control.prompt_text().trim_end().ends_with("</think>") {
            expected.reasoning.clear();
        }
        expected
    }

    fn check(&self, recorded: &Recorded, body: &Value, reply: &Reply) -> Answer {
        let answer = self.ask(recorded, body, reply);
        let expected = self.expected(reply);
        let context = format!("{} with {:?}, stream: {}", recorded.name, self.template, body["stream"]);
        assert_eq!(answer.reasoning, expected.reasoning, "{context}");
        assert_eq!(answer.content, expected.content, "{context}");
        let calls: Vec<(&str, &Value)> = answer.calls.iter().map(|call| (&*call.name, &call.input)).collect();
        let expected_calls: Vec<(&str, &Value)> = expected.calls.iter().map(|(name, input)| (&**name, input)).collect();
        assert_eq!(calls, expected_calls, "{context}");
        assert_eq!(answer.ended_with_calls, !expected.calls.is_empty(), "{context}");
        if recorded.counts_tokens() || body["stream"] != true {
            let prompt = self.control.last().prompt.len();
            assert_eq!((answer.prompt_tokens, answer.cached_tokens), (prompt, prompt / 2), "{context}");
        }
        answer
    }

    /// Fraction of the earlier prompt's tokens that the later prompt begins with.
    fn shared(&self, earlier: &[u32], later: &[u32]) -> f64 {
        let shared = earlier.iter().zip(later).take_while(|(a, b)| a == b).count();
        shared as f64 / earlier.len() as f64
    }

    /// First turn, tool call, result, final answer.
    fn converse(&self, recorded: &Recorded) {
        let turn = |stream: bool| {
            let mut body = recorded.body.clone();
            body["stream"] = stream.into();
            if !stream {
                // OpenAI refuses stream options without a stream.
                body.as_object_mut().unwrap().remove("stream_options");
            }
            body
        };
        let calls = recorded.example_calls();
        let content = if calls.is_empty() { "All done." } else { "I look." };
        let reply = Reply { reasoning: "Let me see.\nOne step.".into(), content: content.into(), calls };
        self.check(recorded, &turn(false), &reply);
        let answer = self.check(recorded, &turn(true), &reply);
        if answer.calls.is_empty() {
            return;
        }
        let before = self.control.last().prompt;
        let mut body = turn(true);
        recorded.append_results(&mut body, &answer);
        let done = Reply { reasoning: "It worked.".into(), content: "All done.".into(), calls: vec![] };
        self.check(recorded, &body, &done);
        let shared = self.shared(&before, &self.control.last().prompt);
        assert!(shared >= 0.95, "{} with {:?}: {shared:.3} of the first turn are shared", recorded.name, self.template);
    }

    /// Replays the turns of the recorded conversation. Each prompt begins with nearly all of the first one, and with
    /// most of the previous one: templates leave out the reasoning of turns before the user's last question.
    fn replay(&self, recorded: &Recorded) {
        let done = Reply { reasoning: String::new(), content: "ok".into(), calls: vec![] };
        let mut prompts: Vec<Arc<[u32]>> = Vec::new();
        for body in recorded.turns() {
            self.check(recorded, &body, &done);
            let prompt = self.control.last().prompt;
            for (earlier, min_shared) in
                prompts.first().zip(Some(0.95)).into_iter().chain(prompts.last().zip(Some(0.85)))
            {
                let shared = self.shared(earlier, &prompt);
                let context = format!("{} with {:?}, turn {}", recorded.name, self.template, prompts.len());
                assert!(shared >= min_shared, "{context}: {shared:.3} of an earlier turn are shared");
            }
            prompts.push(prompt);
        }
    }
}

fn every_recorded_request_is_answered(template: Template) {
    let agents = Agents::start(template);
    let fails = |recorded: &&Recorded| {
        // One failure must not hide the others. Unused scripts are dropped.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            agents.converse(recorded);
            agents.replay(recorded);
        }));
        agents.control.scripts.lock().unwrap().clear();
        outcome.is_err()
    };
    let all = Recorded::all();
    let failed: Vec<&str> = all.iter().filter(fails).map(|recorded| &*recorded.name).collect();
    assert!(failed.is_empty(), "these fail: {failed:?}");
}

#[test]
fn agents_work_with_json_calls() {
    every_recorded_request_is_answered(Template::json());
}

#[test]
fn agents_work_with_tagged_calls_and_a_strict_template() {
    every_recorded_request_is_answered(Template::tags());
}

#[test]
fn agents_work_with_a_template_that_knows_three_levels_of_reasoning() {
    every_recorded_request_is_answered(Template::effort());
}

#[test]
#[ignore = "needs the official templates: PEGAINFER_TEST_TEMPLATES=DIR"]
fn agents_work_with_the_official_templates() {
    for template in Template::official() {
        every_recorded_request_is_answered(template);
    }
}

#[test]
fn the_next_turn_is_found_in_the_prefix_cache() {
    let server = TestServer::bundled();
    let recorded = Recorded::all().into_iter().find(|recorded| recorded.name == "pi-chat").unwrap();
    let mut before = None;
    for mut body in recorded.turns().into_iter().take(2) {
        body["model"] = "tiny".into();
        body["max_completion_tokens"] = 4.into();
        body["stream"] = false.into();
        body.as_object_mut().unwrap().remove("stream_options");
        let usage = post_ok(server.address, &recorded.path, &body)["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        if let Some(before) = before {
            assert!(cached as f64 >= 0.95 * before as f64, "{cached} of {before} tokens");
        }
        before = usage["prompt_tokens"].as_u64();
    }
}
