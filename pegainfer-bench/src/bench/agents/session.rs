//! Sessions against the server: each turn sends the whole conversation, with the previous answers as they came.

use super::args::AgentsArgs;
use super::lengths::{Lengths, Probe};
use super::script::{Agent, SUBAGENT_TURNS, Script};
use super::texts::tools;
use super::turn::Turn;
use crate::bench::chat::{Reply, Text};
use crate::bench::http::Api;
use crate::bench::sampling::Fields;
use crate::bench::workload::WARM_UP_TOKENS;
use anyhow::{Error, Result};
use pegainfer_core::rng;
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Words of each message in the prompt that measures the tokenizer.
const PROBE_WORDS: usize = 250;

/// What all sessions of a run share.
pub struct Run {
    /// The server.
    pub api: Api,
    /// The texts.
    pub script: Script,
    /// Mean number of tokens in a word of the texts.
    pub tokens_per_word: f64,
    chat: Chat,
    system_tokens: usize,
    subagents: usize,
}

/// How a request is sent.
struct Chat {
    answer_tokens: usize,
    fields: Fields,
    /// Salt of the prefix cache, so that texts of earlier runs are not found.
    salt: u64,
}

/// A session or sub-agent in progress, or at its end.
pub struct Conversation {
    /// The session or sub-agent.
    pub agent: Agent,
    /// All messages, the last answer included.
    pub messages: Vec<Value>,
    /// Figures of each turn.
    pub turns: Vec<Turn>,
    /// Text of each answer, and number of messages in its prompt.
    pub answers: Vec<(String, usize)>,
    /// Why it ended early.
    pub error: Option<Error>,
    last: Text,
    known: usize,
}

impl Run {
    /// Measures the tokenizer, and writes the texts for it.
    pub async fn new(api: Api, args: &AgentsArgs, salt: u64) -> Result<Self> {
        let mut fields = Fields::new();
        if !args.text_tools {
            fields.insert("tools".into(), tools());
        }
        fields.extend(args.extra_body.clone().unwrap_or_default());
        let chat = Chat { answer_tokens: args.answer_tokens.get(), fields, salt };
        let (system, turn) = (probe(&api, &chat, args, (0, 1)).await?, probe(&api, &chat, args, (0, 2)).await?);
        let tokens = probe(&api, &chat, args, (PROBE_WORDS, 2)).await?.saturating_sub(turn);
        let probe = Probe { system, turn: turn.saturating_sub(system), words: 2 * PROBE_WORDS, tokens };
        let lengths = Lengths::new(args, probe)?;
        let (system_tokens, subagents) = (args.system_tokens.get(), args.subagents);
        let (script, tokens_per_word) = (Script::new(args, lengths)?, lengths.tokens_per_word);
        Ok(Self { api, script, tokens_per_word, chat, system_tokens, subagents })
    }

    /// Sends a prompt again, without the blocks that the sessions left in the prefix cache. `replay` numbers these
    /// requests.
    pub async fn replay(&self, messages: &[Value], replay: usize) -> Result<Reply> {
        let salt = rng::bits(self.chat.salt, replay as u64).max(1);
        self.api.chat(messages, self.chat.answer_tokens, salt, &self.chat.fields).await
    }

    /// Runs a session with its sub-agents. Returns the session first.
    pub async fn session(self: Arc<Self>, session: usize) -> Vec<Conversation> {
        let mut main = Conversation::new(&self, Agent { session, subagent: None });
        let subagents_after = self.script.subagents_after();
        main.take_turns(&self, 0..subagents_after + 1).await;
        let mut tasks = JoinSet::new();
        for n in (0..self.subagents).filter(|_| main.error.is_none()) {
            let run = self.clone();
            tasks.spawn(async move {
                let mut conversation = Conversation::new(&run, Agent { session, subagent: Some(n) });
                conversation.take_turns(&run, 0..SUBAGENT_TURNS).await;
                conversation
            });
        }
        let subagents = tasks.join_all().await;
        main.take_turns(&self, subagents_after + 1..self.script.turns()).await;
        std::iter::once(main).chain(subagents).collect()
    }
}

/// Prompt tokens of a system message without words and `turns` turns of `words` words.
async fn probe(api: &Api, chat: &Chat, args: &AgentsArgs, (words, turns): (usize, usize)) -> Result<usize> {
    let script = Script::new(args, Lengths { tokens_per_word: 1.0, system: 0, task: words, turn: words })?;
    // No session has this number, so none finds these texts in the prefix cache.
    let messages = script.silent(Agent { session: usize::MAX - 1, subagent: Some(0) }, turns);
    let salt = rng::bits(chat.salt, u64::MAX).max(1);
    Ok(api.chat(&messages, WARM_UP_TOKENS, salt, &chat.fields).await?.completion.prompt)
}

impl Conversation {
    fn new(run: &Run, agent: Agent) -> Self {
        // A sub-agent has the system prompt of its session.
        let known = if agent.subagent.is_some() { run.system_tokens } else { 0 };
        let messages = vec![run.script.system(agent)];
        Self { agent, messages, turns: vec![], answers: vec![], error: None, last: Text::default(), known }
    }

    /// True if it came to its end, and the last answer names the code word.
    pub fn has_code_word(&self, script: &Script) -> bool {
        self.turns.len() == script.turns() && self.last.all().contains(&script.code_word(self.agent))
    }

    /// Takes these turns, until one fails.
    async fn take_turns(&mut self, run: &Run, range: Range<usize>) {
        for turn in range {
            if self.error.is_some() {
                return;
            }
            tokio::time::sleep(run.script.think_time(self.agent, turn)).await;
            self.error = self.take_turn(run, turn).await.err();
        }
    }

    async fn take_turn(&mut self, run: &Run, turn: usize) -> Result<()> {
        let mut calls = Vec::new();
        if turn > 0 {
            calls = run.script.calls(self.agent, turn, &self.last);
            self.messages.push(self.last.message(&calls));
        }
        self.messages.extend(run.script.messages(self.agent, turn, &calls));
        let Chat { answer_tokens, fields, salt } = &run.chat;
        let reply = run.api.chat(&self.messages, *answer_tokens, *salt, fields).await?;
        self.last = reply.text.clone();
        self.answers.push((self.last.all(), self.messages.len()));
        let figures = Turn::new(self.agent, turn, self.known, reply);
        self.known = figures.known_after();
        self.turns.push(figures);
        Ok(())
    }
}
