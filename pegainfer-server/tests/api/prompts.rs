//! Prompt fields, and options of the generated text, over HTTP with the bundled checkpoint.

use crate::support::client::{post, post_ok, with};
use crate::support::mock::{EOS, MockEngine};
use crate::support::{Setup, TestServer, tokenizer};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "Once upon a time, in a café,";

fn completion(fields: Value) -> Value {
    with(json!({"prompt": TEXT, "max_tokens": 4, "temperature": 0, "seed": 0}), fields)
}

#[test]
fn an_echoed_prompt_has_text_and_log_probabilities_like_what_follows() {
    let server = TestServer::bundled();
    let choice = |body: &Value| post_ok(server.address, COMPLETIONS, body)["choices"][0].clone();
    let plain = choice(&completion(json!({"logprobs": 2})));
    let echoed = choice(&completion(json!({"logprobs": 2, "echo": true})));
    assert_eq!(echoed["text"], TEXT.to_string() + plain["text"].as_str().unwrap());
    let ids = tokenizer().encode(TEXT, false).unwrap();
    let lists = &echoed["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs"] {
        let (all, new) = (lists[name].as_array().unwrap(), plain["logprobs"][name].as_array().unwrap());
        assert_eq!(all.len(), ids.len() + 4, "{name}");
        assert_eq!(all[ids.len()..], new[..], "{name}");
    }
    assert_eq!((&lists["token_logprobs"][0], &lists["top_logprobs"][0]), (&Value::Null, &Value::Null));
    let tokens: Vec<&str> = lists["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(lists["text_offset"][ids.len()], TEXT.chars().count());
    for (i, offset) in lists["text_offset"].as_array().unwrap()[..ids.len()].iter().enumerate() {
        let before: Vec<u8> = ids[..i].iter().flat_map(|id| tokenizer().token_bytes(*id)).collect();
        let chars = String::from_utf8_lossy(&before).chars().filter(|c| *c != '\u{FFFD}').count();
        assert_eq!(offset.as_u64().unwrap() as usize, chars, "{tokens:?}");
    }
    // A request reports the same log-probability for a prompt token as for a drawn token.
    let mut sum = 0.0;
    for i in 1..ids.len() {
        let forced =
            json!({"prompt": ids[..i], "max_tokens": 1, "logprobs": 2, "logit_bias": {ids[i].to_string(): 100}});
        let drawn = choice(&completion(forced));
        assert_eq!(lists["token_logprobs"][i], drawn["logprobs"]["token_logprobs"][0]);
        assert_eq!(lists["top_logprobs"][i], drawn["logprobs"]["top_logprobs"][0]);
        sum += lists["token_logprobs"][i].as_f64().unwrap();
    }
    assert!(sum < -5.0, "{sum}");
    // As lm-eval asks: a batch of token ids, and streamed.
    let body = completion(json!({"prompt": [ids, ids[..3]], "max_tokens": 1, "logprobs": 1, "echo": true}));
    let batch = post_ok(server.address, COMPLETIONS, &body);
    for (i, n) in [(0, ids.len()), (1, 3)] {
        assert_eq!(batch["choices"][i]["logprobs"]["tokens"].as_array().unwrap().len(), n + 1);
    }
    let streamed = with(completion(json!({"logprobs": 2, "echo": true})), json!({"stream": true}));
    let events = post(server.address, COMPLETIONS, &streamed).events();
    let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    let logprobs: Vec<&Value> =
        events.iter().flat_map(|event| event["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap()).collect();
    assert_eq!((json!(text), json!(logprobs)), (echoed["text"].clone(), lists["token_logprobs"].clone()));
}

#[test]
fn prompt_logprobs_have_ranks_and_token_ids() {
    let server = TestServer::bundled();
    let ids = tokenizer().encode(TEXT, false).unwrap();
    let body = completion(json!({"prompt_logprobs": 2, "return_token_ids": true, "echo": true, "logprobs": 0}));
    let choice = post_ok(server.address, COMPLETIONS, &body)["choices"][0].clone();
    assert_eq!(choice["prompt_token_ids"], json!(ids));
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), 4);
    let positions = choice["prompt_logprobs"].as_array().unwrap();
    assert_eq!((positions.len(), &positions[0]), (ids.len(), &Value::Null));
    for (i, position) in positions.iter().enumerate().skip(1) {
        let entries = position.as_object().unwrap();
        let (first, own) = entries.iter().next().unwrap();
        assert_eq!(first, &ids[i].to_string());
        assert_eq!(own["logprob"], choice["logprobs"]["token_logprobs"][i]);
        let rank = own["rank"].as_u64().unwrap();
        assert_eq!(
            entries.len(),
            if rank <= 2 { 2 } else { 3 },
            "the token itself and the two most likely: {position}"
        );
        let mut by_rank: Vec<(u64, f64)> =
            entries.values().map(|t| (t["rank"].as_u64().unwrap(), t["logprob"].as_f64().unwrap())).collect();
        by_rank.sort_by_key(|entry| entry.0);
        assert!(by_rank.is_sorted_by(|a, b| a.0 < b.0 && a.1 >= b.1), "{position}");
    }
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = json!({"messages": messages, "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": true});
    let response = post_ok(server.address, CHAT, &chat);
    let count = response["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(response["prompt_logprobs"].as_array().unwrap().len(), count);
    assert_eq!(response["prompt_token_ids"].as_array().unwrap().len(), count);
    let ids = response["choices"][0]["token_ids"].as_array().unwrap();
    assert_eq!(ids.len() as u64, response["usage"]["completion_tokens"].as_u64().unwrap());
}

#[test]
fn a_prompt_can_be_scored_without_a_token() {
    let server = TestServer::bundled();
    let ids = tokenizer().encode(TEXT, false).unwrap();
    let fields = json!({"max_tokens": 0, "echo": true, "logprobs": 2});
    let scored = post_ok(server.address, COMPLETIONS, &completion(fields.clone()));
    let longer = post_ok(server.address, COMPLETIONS, &completion(with(fields.clone(), json!({"max_tokens": 1}))));
    let choice = &scored["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(TEXT), &json!("length")));
    assert_eq!(
        (&scored["usage"]["completion_tokens"], &scored["usage"]["prompt_tokens"]),
        (&json!(0), &json!(ids.len()))
    );
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    let all = longer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(logprobs[..], all[..ids.len()]);
    let events = post(server.address, COMPLETIONS, &completion(with(fields, json!({"stream": true})))).events();
    assert_eq!((events.len(), &events[0]["choices"][0]["text"]), (1, &json!(TEXT)));
    let error = post(server.address, COMPLETIONS, &completion(json!({"max_tokens": 0})));
    assert_eq!((error.status, &error.json()["error"]["param"]), (400, &json!("max_tokens")));
    server.wait_idle();
}

#[test]
fn long_prompts_are_cut_where_the_client_says() {
    let (server, control) = TestServer::replying("x");
    let ids: Vec<u32> = (300..900).collect();
    let cut = |fields: Value| {
        post_ok(server.address, COMPLETIONS, &with(json!({"prompt": ids, "max_tokens": 12}), fields));
        control.last().prompt.to_vec()
    };
    assert_eq!(cut(json!({"truncate_prompt_tokens": 5})), ids[595..]);
    assert_eq!(cut(json!({"truncate_prompt_tokens": 5, "truncation_side": "right"})), ids[..5]);
    assert_eq!(cut(json!({"truncate_prompt_tokens": -1})), ids[100..], "500 of 512 tokens are for the prompt");
    let whole = json!({"prompt": ids, "max_tokens": 12});
    for (body, param) in [
        (whole.clone(), "prompt"),
        (with(whole.clone(), json!({"truncate_prompt_tokens": 0})), "truncate_prompt_tokens"),
        (with(whole.clone(), json!({"truncation_side": "middle"})), "truncation_side"),
        (with(whole.clone(), json!({"prompt_logprobs": 21})), "prompt_logprobs"),
        (with(whole, json!({"prompt_logprobs": 1, "stream": true})), "prompt_logprobs"),
    ] {
        let response = post(server.address, COMPLETIONS, &body);
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[test]
fn stops_and_special_tokens_can_be_part_of_the_text() {
    let special = tokenizer().encode("<|im_start|>", false).unwrap();
    let reply = [tokenizer().encode(" one two", false).unwrap(), special, vec![EOS]].concat();
    let (engine, _) = MockEngine::replying_ids(reply);
    let server = TestServer::start(engine, Setup::default());
    let choice = |fields: Value| {
        let plain = post_ok(server.address, COMPLETIONS, &with(json!({"prompt": "x"}), fields.clone()));
        let body = with(json!({"prompt": "x", "stream": true}), fields);
        let events = post(server.address, COMPLETIONS, &body).events();
        let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, plain["choices"][0]["text"].as_str().unwrap());
        text
    };
    assert_eq!(choice(json!({})), " one two");
    assert_eq!(choice(json!({"skip_special_tokens": false})), " one two<|im_start|>");
    let all = json!({"skip_special_tokens": false, "include_stop_str_in_output": true});
    assert_eq!(choice(all), " one two<|im_start|><|im_end|>");
    assert_eq!(choice(json!({"stop": ["e t"]})), " on");
    assert_eq!(choice(json!({"stop": ["e t"], "include_stop_str_in_output": true})), " one t");
    let body = json!({"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": true});
    let logprobs = post_ok(server.address, COMPLETIONS, &body)["choices"][0]["logprobs"].clone();
    assert!(logprobs["tokens"][0].as_str().unwrap().starts_with("token_id:"), "{logprobs}");
    assert!(logprobs["top_logprobs"][0].as_object().unwrap().keys().all(|key| key.starts_with("token_id:")));
}

#[test]
fn a_message_can_be_continued() {
    let (server, control) = TestServer::replying(" cat.");
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am a"}]);
    let body = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": false});
    let response = post_ok(server.address, CHAT, &body);
    assert_eq!(response["choices"][0]["message"]["content"], " cat.");
    let prompt = tokenizer().decode_all(&control.last().prompt);
    assert!(prompt.ends_with("\nI am a"), "{prompt:?}");
    // Texts that the template itself writes after a message.
    for text in ["<", "end", "im", "|", ">", "n", "The end", "assistant"] {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]);
        post_ok(server.address, CHAT, &with(body.clone(), json!({"messages": messages})));
        let prompt = tokenizer().decode_all(&control.last().prompt);
        assert!(prompt.ends_with(&format!("\n{text}")), "{text}: {prompt:?}");
    }
    for (fields, expected) in [
        (json!({"add_generation_prompt": true}), "add_generation_prompt"),
        (json!({"messages": [{"role": "user", "content": ""}]}), "nothing to continue"),
    ] {
        let response = post(server.address, CHAT, &with(body.clone(), fields));
        assert_eq!(response.status, 400);
        assert!(response.text().contains(expected));
    }
}

#[test]
fn several_prompts_give_several_choices() {
    let (server, control) = TestServer::replying(" a cat");
    for prompt in [json!(["one", "two", "three"]), json!([[1, 2], [3], [4, 5, 6]])] {
        let response = post_ok(server.address, COMPLETIONS, &json!({"prompt": prompt}));
        let choices = response["choices"].as_array().unwrap();
        assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(choices.iter().all(|c| c["text"] == " a cat"));
        assert_eq!(response["usage"]["completion_tokens"], 9);
    }
    assert_eq!(*control.last().prompt, [4, 5, 6]);
    let body = json!({"prompt": [[1], [2]], "stream": true, "stream_options": {"include_usage": true}});
    let events = post(server.address, COMPLETIONS, &body).events();
    for index in 0..2 {
        let of_choice = events.iter().filter(|e| e["choices"][0]["index"] == index);
        let text: String = of_choice.map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, " a cat");
    }
    assert_eq!(events.last().unwrap()["usage"]["total_tokens"], 8);
    let finishes = events.iter().filter(|e| e["choices"][0]["finish_reason"] == "stop").count();
    assert_eq!(finishes, 2);
}
