//! The texts of the sessions: a pure function of the seed, the session and the turn.

use super::args::AgentsArgs;
use super::lengths::Lengths;
use super::texts::{system, word, words};
use crate::bench::chat::{Call, Text};
use crate::bench::workload::exponential;
use anyhow::{Result, ensure};
use pegainfer_core::rng;
use serde_json::{Value, json};
use std::time::Duration;

/// Number of turns of a sub-agent.
pub const SUBAGENT_TURNS: usize = 2;
/// The turn with the tool result that names the code word.
const NEEDLE_TURN: usize = 1;
/// A session, or a sub-agent of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agent {
    /// Number of the session.
    pub session: usize,
    /// Number of the sub-agent in the session; `None` for the session itself.
    pub subagent: Option<usize>,
}

/// Writes the texts.
#[derive(Debug, Clone)]
pub struct Script {
    seed: u64,
    lengths: Lengths,
    turns: usize,
    has_distinct_systems: bool,
    has_text_tools: bool,
    think_time: Duration,
}

impl Script {
    /// The texts for these flags.
    pub fn new(args: &AgentsArgs, lengths: Lengths) -> Result<Self> {
        let (seed, turns) = (args.seed, turns(args)?);
        let (has_distinct_systems, has_text_tools) = (args.distinct_systems, args.text_tools);
        Ok(Self {
            seed,
            lengths,
            turns,
            has_distinct_systems,
            has_text_tools,
            think_time: args.think_time.unwrap_or_default(),
        })
    }

    /// The messages of `turns` turns of an agent that answers nothing.
    pub fn silent(&self, agent: Agent, turns: usize) -> Vec<Value> {
        let mut messages = vec![self.system(agent)];
        for turn in 0..turns {
            let calls = if turn > 0 { self.calls(agent, turn, &Text::default()) } else { Vec::new() };
            messages.extend((turn > 0).then(|| Text::default().message(&calls)));
            messages.extend(self.messages(agent, turn, &calls));
        }
        messages
    }

    /// Refuses flags that no session can have.
    pub fn check(args: &AgentsArgs) -> Result<()> {
        turns(args).map(|_| ())
    }

    /// Number of turns of a session.
    pub fn turns(&self) -> usize {
        self.turns
    }

    /// The turn after which a session starts its sub-agents.
    pub fn subagents_after(&self) -> usize {
        self.turns / 2 - 1
    }

    /// The system message.
    pub fn system(&self, agent: Agent) -> Value {
        let session = if self.has_distinct_systems { agent.session as u64 + 1 } else { 0 };
        system(rng::bits(self.seed, session), self.lengths.system, self.has_text_tools)
    }

    /// The calls that an assistant's message before `turn` must have: the model's own ones if they can be sent back, or
    /// else one that the script writes.
    pub fn calls(&self, agent: Agent, turn: usize, answer: &Text) -> Vec<Call> {
        if self.has_text_tools || self.is_question(agent, turn) {
            return Vec::new();
        }
        let is_valid = |call: &Call| {
            let arguments = serde_json::from_str::<Value>(&call.arguments);
            !call.id.is_empty() && !call.name.is_empty() && arguments.is_ok_and(|it| it.is_object())
        };
        let own: Vec<Call> = answer.calls.iter().filter(|call| is_valid(call)).cloned().collect();
        if !own.is_empty() {
            return own;
        }
        let seed = self.seed_of(agent, turn);
        let path = format!("src/{}/{}.rs", word(seed, 0), word(seed, 1));
        vec![Call {
            id: format!("call_{seed:016x}"),
            name: "read_file".into(),
            arguments: json!({"path": path, "first_line": rng::below(rng::bits(seed, 2), 1000)}).to_string(),
        }]
    }

    /// The messages that begin `turn`: a task, the results of `calls`, or the question at the end.
    pub fn messages(&self, agent: Agent, turn: usize, calls: &[Call]) -> Vec<Value> {
        let (seed, user) = (self.seed_of(agent, turn), |text: String| json!({"role": "user", "content": text}));
        if self.is_question(agent, turn) {
            return vec![user(
                "Which release code word does the first tool result name? Answer with that word.".into(),
            )];
        }
        if turn == 0 {
            let text = words(seed, self.lengths.task);
            return vec![user(format!("Task {seed:016x}: do what these notes ask for, with the tools.\n{text}"))];
        }
        let fact = match agent.subagent {
            None if turn == NEEDLE_TURN => format!("The release code word is {}.\n", self.code_word(agent)),
            _ => String::new(),
        };
        let result = format!("Result {seed:016x}:\n{fact}{}", words(seed, self.lengths.turn));
        if calls.is_empty() {
            return vec![user(result)];
        }
        let results = std::iter::once(result).chain(std::iter::repeat("done".to_owned()));
        let message = |(call, text): (&Call, String)| json!({"role": "tool", "tool_call_id": call.id, "content": text});
        calls.iter().zip(results).map(message).collect()
    }

    /// The code word of a session.
    pub fn code_word(&self, agent: Agent) -> String {
        let seed = self.seed_of(agent, usize::MAX);
        format!("{}-{}", word(seed, 0), 1000 + rng::below(rng::bits(seed, 1), 9000))
    }

    /// Time before a turn.
    pub fn think_time(&self, agent: Agent, turn: usize) -> Duration {
        if turn == 0 { Duration::ZERO } else { self.think_time.mul_f64(exponential(self.seed_of(agent, turn), 3)) }
    }

    /// True for the turn that asks for the code word.
    fn is_question(&self, agent: Agent, turn: usize) -> bool {
        agent.subagent.is_none() && turn + 1 == self.turns
    }

    fn seed_of(&self, agent: Agent, turn: usize) -> u64 {
        let session = rng::bits(!self.seed, agent.session as u64);
        rng::bits(rng::bits(session, agent.subagent.map_or(0, |n| n as u64 + 1)), turn as u64)
    }
}

/// Number of turns until a prompt has about `--grow-to` tokens: the task, tool results, and the question.
fn turns(args: &AgentsArgs) -> Result<usize> {
    let [system, turn, answer, grow_to] =
        [args.system_tokens, args.turn_tokens, args.answer_tokens, args.grow_to].map(|n| n.get());
    let least = system + 2 * (turn + answer);
    ensure!(
        grow_to >= least,
        "--grow-to {grow_to} is too short: three turns after the system prompt need {least} tokens"
    );
    Ok(1 + (grow_to - system) / (turn + answer))
}

#[cfg(test)]
mod tests {
    use super::super::lengths::Probe;
    use super::*;
    use clap::Parser;
    use std::collections::HashSet;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        agents: AgentsArgs,
    }

    const MAIN: Agent = Agent { session: 0, subagent: None };

    fn args(flags: &[&str]) -> AgentsArgs {
        Flags::parse_from(["agents"].iter().chain(flags)).agents
    }

    /// Texts for a tokenizer with `tokens` tokens in 100 words.
    fn script(flags: &[&str], tokens: usize) -> Script {
        let args = args(flags);
        Script::new(&args, Lengths::new(&args, probe(tokens)).unwrap()).unwrap()
    }

    fn probe(tokens: usize) -> Probe {
        Probe { system: 400, turn: 50, words: 100, tokens }
    }

    fn count(message: &Value) -> usize {
        message["content"].as_str().unwrap().split_whitespace().count()
    }

    fn all(script: &Script, agent: Agent) -> Vec<Value> {
        let messages = |turn| script.messages(agent, turn, &script.calls(agent, turn, &Text::default()));
        std::iter::once(script.system(agent)).chain((0..script.turns()).flat_map(messages)).collect()
    }

    #[test]
    fn texts_are_a_function_of_the_seed() {
        let messages = |flags: &[&str]| all(&script(flags, 100), MAIN);
        assert_eq!(messages(&[]), messages(&[]));
        let (one, two) = (messages(&["--seed", "1"]), messages(&["--seed", "2"]));
        // All but the question differ.
        let equal = one.iter().zip(&two).filter(|(a, b)| a == b).count();
        assert_eq!((one.len(), equal), (8, 1));
    }

    #[test]
    fn prompts_have_the_lengths_of_the_flags() {
        let script = script(&[], 125);
        // 11,600 of 12,000 tokens, and 950 of 1,000 in a turn, at 1.25 tokens a word.
        assert!(count(&script.system(MAIN)).abs_diff(9280) < 20, "{}", count(&script.system(MAIN)));
        let turn = count(&script.messages(MAIN, 2, &[])[0]);
        assert!(turn.abs_diff(760) < 20, "{turn}");
        let task = count(&script.messages(MAIN, 0, &[])[0]);
        assert!(task.abs_diff(800) < 20, "{task}");
        // From 12,000 to 19,200 tokens: six turns of 1,200, then the question.
        assert_eq!((script.turns(), script.subagents_after()), (7, 2));
        let error = |flags: &[&str]| turns(&args(flags)).unwrap_err().to_string();
        assert!(error(&["--grow-to", "14000"]).contains("need 14400 tokens"));
        assert_eq!(turns(&args(&["--grow-to", "14400"])).unwrap(), 3);
        let error = |flags: &[&str], tokens| Lengths::new(&args(flags), probe(tokens)).unwrap_err().to_string();
        assert!(error(&["--system-tokens", "300"], 125).contains("the template have 400 tokens"));
        assert!(error(&["--turn-tokens", "49"], 125).contains("an empty tool result has 50 tokens"));
        assert!(error(&[], 0).contains("do not grow"));
    }

    #[test]
    fn sessions_share_only_the_system_prompt() {
        let agents = [(0, None), (0, Some(0)), (0, Some(1)), (1, None), (1, Some(0))];
        let agents = agents.map(|(session, subagent)| Agent { session, subagent });
        let first = |script: &Script| -> (HashSet<String>, HashSet<String>) {
            let system = agents.iter().map(|&agent| script.system(agent).to_string()).collect();
            (system, agents.iter().map(|&agent| script.messages(agent, 0, &[])[0].to_string()).collect())
        };
        let (shared, tasks) = first(&script(&[], 100));
        assert_eq!((shared.len(), tasks.len()), (1, 5));
        assert_eq!(first(&script(&["--distinct-systems"], 100)).0.len(), 2, "sub-agents have their session's");
    }

    #[test]
    fn the_code_word_is_in_the_first_tool_result_only() {
        let script = script(&[], 100);
        let messages: Vec<String> = all(&script, MAIN).iter().map(Value::to_string).collect();
        let word = script.code_word(MAIN);
        let found: Vec<usize> = (0..messages.len()).filter(|&i| messages[i].contains(&word)).collect();
        assert_eq!(found, [2], "{word}");
        assert_ne!(word, script.code_word(Agent { session: 1, ..MAIN }));
        assert!(messages[7].contains("Which release code word"));
    }

    #[test]
    fn every_call_gets_a_result() {
        let call =
            |id: &str, arguments: &str| Call { id: id.into(), name: "search".into(), arguments: arguments.into() };
        let script = script(&[], 100);
        let broken = Text { calls: vec![call("a", "{\"pattern\": ")], ..Text::default() };
        let own = script.calls(MAIN, 1, &broken);
        assert_eq!((own.len(), own[0].name.as_str()), (1, "read_file"), "a call that was cut off is replaced");
        let two = Text { calls: vec![call("a", "{}"), call("b", "{}")], ..Text::default() };
        assert_eq!(script.calls(MAIN, 1, &two), two.calls);
        let results = script.messages(MAIN, 1, &two.calls);
        let ids: Vec<&str> = results.iter().map(|result| result["tool_call_id"].as_str().unwrap()).collect();
        assert_eq!((ids, &results[1]["content"]), (vec!["a", "b"], &json!("done")));
        assert!(script.calls(MAIN, 6, &two).is_empty(), "no result follows before the question");
        let text = self::script(&["--text-tools"], 100);
        assert!(text.calls(MAIN, 1, &two).is_empty());
        assert!(text.system(MAIN)["content"].as_str().unwrap().contains("\"run_command\""));
    }

    #[test]
    fn think_times_have_their_mean() {
        let script = script(&["--think-time", "2"], 100);
        let times: Vec<f64> = (0..4000).map(|turn| script.think_time(MAIN, turn).as_secs_f64()).collect();
        assert_eq!(times[0], 0.0);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        // Five standard errors.
        assert!((mean / 2.0 - 1.0).abs() < 5.0 / 4000f64.sqrt(), "{mean}");
        assert_eq!(self::script(&[], 100).think_time(MAIN, 5), Duration::ZERO);
    }
}
