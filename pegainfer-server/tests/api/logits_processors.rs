//! Each field that changes logits changes the output as specified, over HTTP with the bundled checkpoint. Also tests
//! `n`.

use crate::support::client::{post, post_ok, with};
use crate::support::{TestServer, tokenizer};
use pegainfer_text::Tokenizer;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

struct Tiny {
    server: TestServer,
    tokenizer: Tokenizer,
}

impl Tiny {
    fn start() -> Self {
        Self { server: TestServer::bundled(), tokenizer: tokenizer() }
    }

    /// A greedy completion of 24 tokens; `fields` override these defaults.
    fn complete(&self, prompt: &str, fields: Value) -> Value {
        let body = with(json!({"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": true}), fields);
        post_ok(self.server.address, COMPLETIONS, &body)
    }

    fn text(&self, prompt: &str, fields: Value) -> String {
        self.complete(prompt, fields)["choices"][0]["text"].as_str().unwrap().to_string()
    }

    /// The id of a text that is one token.
    fn id(&self, text: &str) -> u32 {
        let ids = self.tokenizer.encode(text, false).unwrap();
        assert_eq!(ids.len(), 1, "{text:?}");
        ids[0]
    }
}

#[test]
fn a_bias_bans_and_forces_and_leaves_the_reported_log_probabilities_raw() {
    let tiny = Tiny::start();
    let one =
        |bias: Value| tiny.complete("Once upon a time", json!({"max_tokens": 1, "logprobs": 2, "logit_bias": bias}));
    let free = one(json!({}));
    let best = free["choices"][0]["text"].as_str().unwrap();
    let banned = one(json!({ tiny.id(best).to_string(): -100 }));
    let second = banned["choices"][0]["text"].as_str().unwrap();
    assert_ne!(second, best);
    let top = |response: &Value| response["choices"][0]["logprobs"]["top_logprobs"][0].clone();
    assert_eq!(top(&banned), top(&free), "the report is of the raw logits");
    assert_eq!(banned["choices"][0]["logprobs"]["token_logprobs"][0], top(&free)[second]);
    let forced = one(json!({ tiny.id(" cat").to_string(): 100 }));
    assert_eq!(forced["choices"][0]["text"], " cat");
}

#[test]
fn min_tokens_holds_back_every_end() {
    let tiny = Tiny::start();
    let chat = |fields: Value| {
        let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
        let body = with(json!({"messages": messages, "temperature": 0, "max_tokens": 40}), fields);
        post_ok(tiny.server.address, CHAT, &body)
    };
    let tokens = |response: &Value| response["usage"]["completion_tokens"].as_u64().unwrap();
    let text = |response: &Value| response["choices"][0]["message"]["content"].as_str().unwrap().to_string();
    let free = chat(json!({}));
    assert!(free["choices"][0]["finish_reason"] == "stop" && tokens(&free) < 20, "{free}");
    assert!(tokens(&chat(json!({"min_tokens": 20}))) >= 20);
    let before_the_end = chat(json!({"min_tokens": tokens(&free) - 1}));
    assert_eq!(before_the_end["choices"], free["choices"], "the end is the token after min_tokens others");
    let stops = json!({"stop_token_ids": [tiny.id(" capital")]});
    assert_eq!(text(&chat(stops.clone())), "The");
    let mut held = stops;
    held["min_tokens"] = json!(3);
    assert!(!text(&chat(held)).starts_with("The capital"), "a stop token is not drawn before");
    assert_eq!(text(&chat(json!({"stop": "capital"}))), "The ");
    assert_eq!(
        text(&chat(json!({"stop": "capital", "min_tokens": 3}))),
        text(&free),
        "a stop string is not looked for"
    );
}

#[test]
fn allowed_token_ids_are_the_only_ones() {
    let tiny = Tiny::start();
    let words = [" a", " cat", " the", "."];
    let ids: Vec<u32> = words.iter().map(|word| tiny.id(word)).collect();
    let fields = json!({"allowed_token_ids": ids, "temperature": 2.0, "seed": 3, "logprobs": 0});
    let response = tiny.complete("Once upon a time", fields);
    let drawn = response["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    let distinct: HashSet<&str> = drawn.iter().map(|token| token.as_str().unwrap()).collect();
    assert!(drawn.len() == 24 && distinct.len() > 1 && distinct.iter().all(|t| words.contains(t)), "{distinct:?}");
    assert_eq!(tiny.text("Once upon a time", json!({"allowed_token_ids": [ids[1]], "max_tokens": 3})), " cat cat cat");
}

#[test]
fn penalties_end_loops() {
    let tiny = Tiny::start();
    // Few enough tokens that the model repeats itself.
    let few: Vec<u32> = (300..330).collect();
    let max_repeats = |fields: Value| {
        let mut fields = fields;
        fields["logprobs"] = json!(0);
        fields["max_tokens"] = json!(60);
        fields["allowed_token_ids"] = json!(few);
        let response = tiny.complete("the cat the cat the cat the cat the cat the cat", fields);
        let mut counts: HashMap<String, usize> = HashMap::new();
        for token in response["choices"][0]["logprobs"]["tokens"].as_array().unwrap() {
            *counts.entry(token.as_str().unwrap().to_string()).or_default() += 1;
        }
        *counts.values().max().unwrap()
    };
    let free = max_repeats(json!({}));
    assert_eq!(max_repeats(json!({"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1})), free);
    let penalised = max_repeats(json!({"frequency_penalty": 2}));
    assert!(2 * penalised <= free, "{free} times the same token, {penalised} with frequency_penalty");
    assert!(max_repeats(json!({"frequency_penalty": -2})) > 2 * free);
    assert!(max_repeats(json!({"repetition_penalty": 3.0})) < free);
    assert!(max_repeats(json!({"presence_penalty": 2})) < free);
}

#[test]
fn bad_words_do_not_come() {
    let tiny = Tiny::start();
    let free = tiny.text("Once upon a time", json!({}));
    let words: Vec<&str> = free.split_whitespace().filter(|word| word.chars().all(char::is_alphabetic)).collect();
    let (word, phrase) = (words[1], words[1..3].join(" "));
    assert!(free.contains(&phrase) && tiny.tokenizer.encode(&phrase, false).unwrap().len() > 1, "{free:?}");
    let without = tiny.text("Once upon a time", json!({"bad_words": [phrase]}));
    let others: Vec<&str> = without.split_whitespace().collect();
    let again = others.windows(2).any(|pair| pair.join(" ") == phrase);
    assert!(others.contains(&word) && !again, "{free:?} became {without:?}");
    let without = tiny.text("Once upon a time", json!({"bad_words": [word]}));
    assert!(!without.split_whitespace().any(|other| other == word), "{free:?} became {without:?}");
}

#[test]
fn n_choices_are_what_requests_with_neighbouring_seeds_give() {
    let tiny = Tiny::start();
    let fields = |seed: u64, n: u64| {
        json!({"seed": seed, "n": n, "best_of": n, "temperature": 1.0, "frequency_penalty": 0.5,
            "logit_bias": {"5": 1}, "ignore_eos": false})
    };
    let three = tiny.complete("Once upon a time", fields(7, 3));
    let mut completion = 0;
    for i in 0..3 {
        let alone = tiny.complete("Once upon a time", fields(7 + i, 1));
        let choice = &three["choices"][i as usize];
        assert_eq!((&choice["index"], &choice["text"]), (&json!(i), &alone["choices"][0]["text"]));
        assert_eq!(three["usage"]["prompt_tokens"], alone["usage"]["prompt_tokens"], "a prompt counts once");
        completion += alone["usage"]["completion_tokens"].as_u64().unwrap();
    }
    assert_eq!(three["usage"]["completion_tokens"], completion);
    let mut body = fields(7, 3);
    body["prompt"] = json!(["Once upon a time", "The dog"]);
    body["max_tokens"] = json!(24);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = post(tiny.server.address, COMPLETIONS, &body).events();
    for i in 0..6 {
        let of_choice = events.iter().filter(|event| event["choices"][0]["index"] == i);
        let text: String = of_choice.map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert!(i >= 3 || three["choices"][i]["text"] == text, "choice {i}");
        assert!(!text.is_empty());
    }
    let prompts = tiny.tokenizer.encode("Once upon a time", false).unwrap().len()
        + tiny.tokenizer.encode("The dog", false).unwrap().len();
    assert_eq!(events.last().unwrap()["usage"]["prompt_tokens"], prompts);
}

#[test]
fn a_chat_has_n_choices_each_with_its_role() {
    let (server, control) = TestServer::replying(" a cat");
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 5});
    let plain = post_ok(server.address, CHAT, &body);
    let indices: Vec<u64> = plain["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2]);
    assert!(plain["choices"].as_array().unwrap().iter().all(|c| c["message"]["content"] == " a cat"));
    let prompt = control.last().prompt.len();
    let counts = (&plain["usage"]["prompt_tokens"], &plain["usage"]["completion_tokens"]);
    assert_eq!(counts, (&json!(prompt), &json!(9)));
    let seeds: Vec<u64> = control.added.lock().unwrap().iter().map(|request| request.sampling.seed()).collect();
    assert_eq!(seeds, [5, 6, 7]);
    body["stream"] = json!(true);
    let events = post(server.address, CHAT, &body).events();
    for index in 0..3 {
        let deltas: Vec<&Value> =
            events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).map(|c| &c["delta"]).collect();
        assert_eq!(deltas[0]["role"], "assistant");
        assert_eq!(deltas.iter().filter(|delta| delta.get("role").is_some()).count(), 1);
        let text: String = deltas.iter().map(|delta| delta["content"].as_str().unwrap()).collect();
        assert_eq!(text, " a cat");
    }
    let body = json!({"prompt": vec!["x"; 100], "n": 3});
    let error = post(server.address, COMPLETIONS, &body);
    assert_eq!((error.status, error.json()["error"]["param"].clone()), (400, json!("n")));
}
