//! Accuracy on word problems in the format of GSM8K: JSON Lines with `question`, and `answer` that ends with `#### N`.

use super::answer::final_number;
use crate::in_process::{ChatApi, Response, Servers};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::progress::{Progress, Unit};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// End of each question, so that the answer can be found.
const INSTRUCTION: &str = "Solve this step by step. Write the final number on the last line, after ####.";

/// Flags of `eval gsm8k`.
#[derive(Debug, Clone, Args)]
pub struct Gsm8kArgs {
    /// Problems, JSON Lines with question and answer (#### N), such as test.jsonl of GSM8K
    pub file: PathBuf,
    /// Solved problems of the same format, such as train.jsonl, that --shots takes examples from
    #[arg(long, value_name = "FILE")]
    pub examples: Option<PathBuf>,
    /// Number of solved examples before each question, the first ones of --examples
    #[arg(long, value_name = "N", default_value = "0")]
    pub shots: usize,
    /// Number of problems, from the first on [default: all]
    #[arg(long, value_name = "N")]
    pub limit: Option<NonZeroUsize>,
    /// Maximum number of tokens of an answer, reasoning included
    #[arg(long, value_name = "TOKENS", default_value = "1024")]
    pub max_tokens: NonZeroUsize,
    /// Maximum number of problems that run at the same time [default: as many as --max-num-seqs]
    #[arg(long, value_name = "N")]
    pub concurrency: Option<NonZeroUsize>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// A problem with its solution.
#[derive(Debug, Clone, Deserialize)]
struct Problem {
    question: String,
    answer: String,
}

/// The measured accuracy.
#[derive(Debug, Clone, Serialize)]
pub struct Accuracy {
    model: String,
    file: String,
    shots: usize,
    /// Number of problems.
    pub problems: usize,
    /// Number of solved problems.
    pub correct: usize,
    /// Number of answers that reached --max-tokens.
    pub cut: usize,
    /// Fraction of solved problems.
    accuracy: f64,
    /// Interval that contains the true fraction with a probability of 95 % (Wilson score interval).
    interval: [f64; 2],
    seconds: f64,
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, file, shots, problems, correct, cut, accuracy, interval, seconds } = self;
        let [low, high] = interval.map(|share| 100.0 * share);
        writeln!(f, "model     {model}")?;
        writeln!(f, "problems  {file}: {problems}, {shots} examples before each; {cut} answers reached --max-tokens")?;
        writeln!(f, "accuracy  {:.1} % ({correct} correct), 95 % interval {low:.1} to {high:.1} %", 100.0 * accuracy)?;
        writeln!(f, "time      {seconds:.1} s")
    }
}

/// Loads the model and measures its accuracy.
pub fn measure(args: &Gsm8kArgs, servers: &dyn Servers) -> Result<Accuracy> {
    let mut problems = read(&args.file)?;
    problems.truncate(args.limit.map_or(usize::MAX, Into::into));
    let examples = args.examples.as_deref().map(read).transpose()?.unwrap_or_default();
    ensure!(args.shots <= examples.len(), "--shots {}: --examples has {} problems", args.shots, examples.len());
    let api = servers.load(&args.engine)?;
    ensure!(api.has_template, "{} has no chat template, which the problems need", api.source);
    let concurrency = args.concurrency.map_or(api.max_num_seqs, Into::into);
    let runtime = Runtime::new().context("the async runtime cannot be started")?;
    let started = Instant::now();
    let bodies = problems.iter().map(|problem| body(problem, &examples[..args.shots], args.max_tokens));
    let answers = runtime.block_on(ask(&api, bodies.collect(), concurrency))?;
    runtime.shutdown_background();
    let solved = |(problem, answer): (&Problem, &Answer)| final_number(&answer.text) == final_number(&problem.answer);
    let correct = problems.iter().zip(&answers).filter(|pair| solved(*pair)).count();
    Ok(Accuracy {
        model: api.source,
        file: args.file.display().to_string(),
        shots: args.shots,
        problems: problems.len(),
        correct,
        cut: answers.iter().filter(|answer| answer.cut).count(),
        accuracy: correct as f64 / problems.len() as f64,
        interval: wilson(correct, problems.len()),
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn read(path: &Path) -> Result<Vec<Problem>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let problems: Vec<Problem> = lines
        .map(|(i, line)| {
            let place = || format!("{}, line {}", path.display(), i + 1);
            let problem: Problem =
                serde_json::from_str(line).with_context(|| format!("{} is not a problem", place()))?;
            ensure!(problem.answer.contains("####"), "{}: the answer has no \"#### N\"", place());
            ensure!(final_number(&problem.answer).is_some(), "{}: the answer has no number", place());
            Ok(problem)
        })
        .collect::<Result<_>>()?;
    ensure!(!problems.is_empty(), "{} has no problem", path.display());
    Ok(problems)
}

/// A greedy chat request, with solved examples before the question.
fn body(problem: &Problem, examples: &[Problem], max_tokens: NonZeroUsize) -> Value {
    let question =
        |problem: &Problem| json!({"role": "user", "content": format!("{}\n\n{INSTRUCTION}", problem.question)});
    let turns = |example| [question(example), json!({"role": "assistant", "content": example.answer})];
    let messages: Vec<Value> = examples.iter().flat_map(turns).chain([question(problem)]).collect();
    json!({"messages": messages, "temperature": 0, "repetition_penalty": 1, "max_completion_tokens": max_tokens})
}

/// A model's answer.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    /// True if it reached the maximum number of tokens.
    cut: bool,
}

/// Answers in the order of the requests, at most `concurrency` of which run at the same time.
async fn ask(api: &ChatApi, bodies: Vec<Value>, concurrency: usize) -> Result<Vec<Answer>> {
    let mut progress = Progress::start("gsm8k", Unit::Requests, 0, bodies.len() as u64);
    let mut answers: Vec<Answer> = bodies.iter().map(|_| Answer::default()).collect();
    let mut requests = bodies.into_iter().enumerate();
    let mut running = JoinSet::new();
    loop {
        while running.len() < concurrency
            && let Some((i, body)) = requests.next()
        {
            let api = api.clone();
            running.spawn(async move { (i, answer(&api, &body).await) });
        }
        let Some(done) = running.join_next().await else { break };
        let (i, answer) = done.context("a request panicked")?;
        answers[i] = answer?;
        progress.add(1);
    }
    progress.finish();
    Ok(answers)
}

async fn answer(api: &ChatApi, body: &Value) -> Result<Answer> {
    let Response { status, body } = (api.post)(serde_json::to_vec(body)?).await?;
    let response: Value = serde_json::from_slice(&body).context("the response is not JSON")?;
    if status != 200 {
        bail!("a problem was refused: {}", response["error"]["message"].as_str().unwrap_or("no reason given"));
    }
    let choice = &response["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap_or_default().to_owned();
    Ok(Answer { text, cut: choice["finish_reason"] == "length" })
}

/// The Wilson score interval of `hits` out of `n` at 95 %.
fn wilson(hits: usize, n: usize) -> [f64; 2] {
    // Quantile of the normal distribution at 97.5 %.
    const Z: f64 = 1.959_964;
    let (n, share) = (n as f64, hits as f64 / n as f64);
    let centre = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    [centre - half, centre + half].map(|bound| (bound / (1.0 + Z * Z / n)).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;

    #[test]
    fn the_interval_is_wilsons() {
        // Newcombe 1998, table I: 0.2553 to 0.3662 for 81 of 263, 0 to 0.1611 for 0 of 20.
        for (hits, n, expected) in [(81, 263, [0.2553, 0.3662]), (0, 20, [0.0, 0.1611]), (20, 20, [0.8389, 1.0])] {
            for (bound, expected) in wilson(hits, n).into_iter().zip(expected) {
                assert!((bound - expected).abs() < 5e-5, "{hits} of {n}: {bound} is not {expected}");
            }
        }
    }

    #[test]
    fn problems_are_checked_by_line() {
        let dir = TempDir::new("gsm8k");
        let path = dir.path().join("problems.jsonl");
        let check = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path).map(|problems| problems.len()).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(
            check("{\"question\": \"q\", \"answer\": \"#### 1\"}\n\n{\"question\": \"q\", \"answer\": \"2 #### 1\"}"),
            Ok(2)
        );
        for (text, reason) in [
            ("", "has no problem"),
            ("{}", "line 1 is not a problem"),
            ("\n{\"question\": \"q\", \"answer\": \"1\"}", "line 2: the answer has no \"#### N\""),
            ("{\"question\": \"q\", \"answer\": \"#### x\"}", "line 1: the answer has no number"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn examples_are_turns_before_the_question() {
        let problem = |n: u32| Problem { question: format!("q{n}"), answer: format!("a{n} #### {n}") };
        let body = body(&problem(3), &[problem(1), problem(2)], NonZeroUsize::MIN);
        let messages = body["messages"].as_array().unwrap();
        let roles: Vec<_> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["user", "assistant", "user", "assistant", "user"]);
        assert_eq!(messages[3]["content"], "a2 #### 2");
        assert!(messages[4]["content"].as_str().unwrap().starts_with("q3\n\nSolve"));
    }
}
