//! Cost of the front end: HTTP, JSON, tokenizer, queues, detokenizer and events, with a mock engine that generates
//! tokens immediately.
//!
//! ```text
//! cargo bench -p pegainfer-server --bench front_end                 # all benchmarks
//! cargo bench -p pegainfer-server --bench front_end -- prompt --model-path DIR
//! ```
//!
//! Client and server share the cores of the machine. The results are in docs/benchmarks/front-end.md.

mod client;
mod engine;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use client::{Connection, Timing};
use engine::InstantEngine;
use futures_util::future::try_join_all;
use pegainfer_core::engine::{EngineConfig, EngineHandle};
use pegainfer_server::app::{App, Options};
use pegainfer_server::http::raise_open_files;
use pegainfer_server::text_service::Checkpoint;
use pegainfer_server::trace::{ChromeFiles, Tracer};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[derive(Parser)]
struct Args {
    /// Benchmarks to run [default: all]
    #[arg(value_enum)]
    what: Vec<What>,
    /// Checkpoint directory whose tokenizer is used [default: the bundled models/qwen3-tiny]
    #[arg(long)]
    model_path: Option<PathBuf>,
    /// Trace every request, to measure the cost of tracing
    #[arg(long)]
    trace_dir: Option<PathBuf>,
    /// Passed by cargo to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum What {
    /// Time to first token while 16 streams run
    Ttft,
    /// Streamed tokens per second
    Throughput,
    /// A prompt of 16,384 tokens, from the client's first byte to the engine
    Prompt,
    /// Resident memory over 100,000 requests
    Memory,
}

fn main() -> Result<()> {
    let args = Args::parse();
    raise_open_files();
    let all = What::value_variants();
    for what in if args.what.is_empty() { all } else { &args.what } {
        match what {
            What::Ttft => ttft(&args)?,
            What::Throughput => throughput(&args)?,
            What::Prompt => prompt(&args)?,
            What::Memory => memory(&args)?,
        }
    }
    Ok(())
}

/// The real server with an instant engine, on a free port.
struct Server {
    address: SocketAddr,
    arrivals: Receiver<Instant>,
    checkpoint: Checkpoint,
    vocab_size: usize,
    /// The server's threads, which end with it.
    _runtime: Runtime,
}

impl Server {
    fn start(args: &Args, pace: Duration) -> Result<Self> {
        let bundled = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/qwen3-tiny"));
        let dir = args.model_path.clone().unwrap_or_else(bundled);
        let checkpoint = Checkpoint::load(&dir)?;
        let vocab_size = pegainfer_models::engine::vocab_size(&dir)?;
        let token = *checkpoint.tokenizer.encode(" the", false)?.first().context("no token")?;
        let (engine, arrivals) = InstantEngine::new(vocab_size, token, pace);
        let engine = EngineHandle::spawn(engine, EngineConfig::default())?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0)))?;
        let address = listener.local_addr()?;
        let start_tracer = |dir: &PathBuf| {
            Ok::<_, anyhow::Error>(Tracer::start(vec![Box::new(ChromeFiles::create(dir, 1 << 30)?)], 1.0)?)
        };
        let tracer = args.trace_dir.as_ref().map(start_tracer).transpose()?;
        let app = App::new(engine, Checkpoint::load(&dir)?, vec![], Options { tracer, ..Options::default() });
        runtime.spawn(app.serve(listener, std::future::pending()));
        Ok(Self { address, arrivals, checkpoint, vocab_size, _runtime: runtime })
    }

    /// Runs `streams` connections, each of which sends a body `requests` times. All clients share one thread.
    fn load(&self, streams: usize, requests: usize, path: &str, body: &str) -> Result<LoadResult> {
        let clients = (0..streams).map(|stream| client(self.address, stream, requests, path, body.as_bytes()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let started = Instant::now();
        let seen = runtime.block_on(try_join_all(clients))?;
        let wall = started.elapsed();
        let chunks = seen.iter().map(|(_, chunks)| chunks).sum();
        Ok(LoadResult { timings: seen.into_iter().flat_map(|(timings, _)| timings).collect(), chunks, wall })
    }
}

/// One client: sends its requests one after another. Returns their times and the number of chunks.
async fn client(
    address: SocketAddr,
    number: usize,
    requests: usize,
    path: &str,
    body: &[u8],
) -> Result<(Vec<Timing>, usize)> {
    let mut connection = Connection::open(address).await?;
    // Stagger the clients, so that they are not synchronised.
    tokio::time::sleep(Duration::from_millis(number as u64)).await;
    let (mut timings, mut chunks) = (Vec::with_capacity(requests), 0);
    for _ in 0..requests {
        timings.push(connection.post(path, body).await?);
        chunks += connection.chunks();
    }
    Ok((timings, chunks))
}

struct LoadResult {
    timings: Vec<Timing>,
    chunks: usize,
    wall: Duration,
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// p50, p90 and p99 in milliseconds.
fn percentiles(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = |percent: usize| milliseconds(times[(times.len() - 1) * percent / 100]);
    format!("p50 {:.3} ms, p90 {:.3} ms, p99 {:.3} ms", at(50), at(90), at(99))
}

fn ttft(args: &Args) -> Result<()> {
    const STREAMS: usize = 16;
    for pace in [5, 2].map(Duration::from_millis) {
        let server = Server::start(args, pace)?;
        let completion = json!({"prompt": "Once upon a time", "max_tokens": 64, "stream": true, "temperature": 0});
        let chat = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64,
            "stream": true, "temperature": 0});
        for (path, body) in [(COMPLETIONS, completion), (CHAT, chat)] {
            let load = server.load(STREAMS, 20, path, &body.to_string())?;
            let times = percentiles(load.timings.iter().map(|timing| timing.first - timing.sent));
            let rate = load.chunks as f64 / load.wall.as_secs_f64();
            println!("ttft: {STREAMS} streams, a step every {pace:?}, {path}: {times} ({rate:.0} chunks/s)");
        }
    }
    Ok(())
}

/// First at full speed, with many tokens per write; then paced like decode steps, with one token per write.
fn throughput(args: &Args) -> Result<()> {
    let body = |prompt: Value| {
        let mut body = json!({"max_tokens": 256, "stream": true, "temperature": 0});
        body.as_object_mut().into_iter().for_each(|body| body.extend(prompt.as_object().cloned().unwrap_or_default()));
        body.to_string()
    };
    let completion = body(json!({"prompt": "Once upon a time"}));
    let chat = body(json!({"messages": [{"role": "user", "content": "Tell me a story."}]}));
    for (pace, streams) in [(0, 16), (0, 256), (5, 100), (5, 150), (5, 200), (5, 300)] {
        let server = Server::start(args, Duration::from_millis(pace))?;
        for (path, body) in [(COMPLETIONS, &completion), (CHAT, &chat)] {
            let load = server.load(streams, 2000_usize.div_ceil(streams).min(6), path, body)?;
            let rate = load.chunks as f64 / load.wall.as_secs_f64();
            let offered = (streams as u64 * 1000).checked_div(pace);
            let offered = offered.map_or("no pause".into(), |rate| format!("{rate} offered"));
            println!("throughput: {streams} streams, {path}, {offered}: {rate:.0} chunks/s");
        }
    }
    Ok(())
}

fn prompt(args: &Args) -> Result<()> {
    const TOKENS: usize = 16_384;
    const RUNS: usize = 40;
    let server = Server::start(args, Duration::ZERO)?;
    let ids = |run: usize| (0..TOKENS).map(|i| (i * 7919 + run * 104_729) % server.vocab_size).collect::<Vec<_>>();
    let text = |run: usize| -> Result<String> {
        let mut text = words(TOKENS, run);
        let tokens = server.checkpoint.tokenizer.encode(&text, false)?.len();
        let keep = text.floor_char_boundary(text.len() * TOKENS / tokens.max(TOKENS));
        text.truncate(keep);
        Ok(text)
    };
    for kind in ["token ids", "text", "a chat"] {
        let (mut times, mut bytes) = (vec![], 0);
        for run in 0..RUNS {
            let (path, body) = match kind {
                "token ids" => (COMPLETIONS, json!({"prompt": ids(run), "max_tokens": 1, "stream": true})),
                "text" => (COMPLETIONS, json!({"prompt": text(run)?, "max_tokens": 1, "stream": true})),
                _ => {
                    let messages = json!([{"role": "user", "content": text(run)?}]);
                    (CHAT, json!({"messages": messages, "max_tokens": 1, "stream": true}))
                }
            };
            let body = body.to_string();
            bytes = body.len();
            let load = server.load(1, 1, path, &body)?;
            let arrived = server.arrivals.try_iter().last().context("no request reached the engine")?;
            times.push(arrived - load.timings[0].sent);
        }
        println!("prompt: {TOKENS} tokens as {kind}, {bytes} bytes: {}", percentiles(times.into_iter()));
    }
    Ok(())
}

/// Pseudo-random text of a small dictionary, which no cache contains.
fn words(count: usize, seed: usize) -> String {
    const WORDS: [&str; 24] = [
        "the",
        "kernel",
        "of",
        "scheduler",
        "river",
        "and",
        "story",
        "time",
        "upon",
        "a",
        "model",
        "bread",
        "window",
        "is",
        "reading",
        "because",
        "function",
        "return",
        "children",
        "they",
        "morning",
        "however",
        "water",
        "played",
    ];
    let mut state = seed as u64 ^ 0x9E37_79B9;
    let mut text = String::new();
    for at in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text += WORDS[(state >> 33) as usize % WORDS.len()];
        text += if at % 13 == 12 { ".\n" } else { " " };
    }
    text
}

fn memory(args: &Args) -> Result<()> {
    const REQUESTS: usize = 100_000;
    const PARTS: usize = 10;
    let server = Server::start(args, Duration::ZERO)?;
    let mut sizes = vec![];
    for part in 0..PARTS {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 4, "stream": part % 2 == 0, "stop": ["\n\n"]});
        server.load(16, REQUESTS / PARTS / 16, COMPLETIONS, &body.to_string())?;
        server.arrivals.try_iter().for_each(drop);
        sizes.push(resident()?);
    }
    println!("memory: resident MiB after each {} requests: {sizes:.1?}", REQUESTS / PARTS);
    let growth = sizes[PARTS - 1] - sizes[1];
    ensure!(growth < 8.0, "{growth:.1} MiB more after {REQUESTS} requests than after {}", REQUESTS / PARTS * 2);
    Ok(())
}

/// Resident memory of this process in MiB.
fn resident() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("resident memory is only known on Linux")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}
