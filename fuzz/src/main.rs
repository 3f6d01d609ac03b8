//! Runs targets on blind mutations of their seeds: without coverage guidance, but with any compiler.

use pegainfer_fuzz::mutate::{Rng, mutate};
use pegainfer_fuzz::{FuzzTarget, TARGETS};
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "pegainfer-fuzz TARGET|all [--seconds N] [--runs N] [--seed N]
Each target runs for that many seconds (60), or for that many inputs if that is less.
targets: requests, conversations, outputs, calls, responses, messages, grammars, gguf, grpc, hub, images, image_parts,
queues";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |flag: &str, default: u64| match args.iter().position(|arg| arg == flag) {
        Some(at) => args.get(at + 1).and_then(|value| value.parse().ok()),
        None => Some(default),
    };
    let name = args.first().map_or("", String::as_str);
    let targets: Vec<&FuzzTarget> = TARGETS.iter().filter(|target| name == "all" || name == target.name).collect();
    let limits = (number("--seconds", 60), number("--runs", u64::MAX), number("--seed", 1));
    let (Some(seconds), Some(runs), Some(seed)) = limits else { return usage() };
    if targets.is_empty() {
        return usage();
    }
    let all_hold = targets.into_iter().all(|target| run(target, Duration::from_secs(seconds), runs, seed));
    if all_hold { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::FAILURE
}

/// Returns true if the target's property held for all inputs.
fn run(target: &FuzzTarget, time: Duration, max_runs: u64, seed: u64) -> bool {
    let (seeds, mut rng) = ((target.seeds)(), Rng(seed));
    let (started, mut runs) = (Instant::now(), 0u64);
    while runs < max_runs && started.elapsed() < time {
        let data = if runs < seeds.len() as u64 { seeds[runs as usize].clone() } else { mutate(&seeds, &mut rng) };
        if catch_unwind(|| (target.check)(&data)).is_err() {
            let path = format!("{}-{seed}-{runs}.input", target.name);
            let kept = std::fs::write(&path, &data).map_or_else(|e| e.to_string(), |()| format!("it is in {path}"));
            eprintln!("input {runs} of seed {seed} violates the property; {kept}");
            return false;
        }
        runs += 1;
    }
    println!("{}: {runs} inputs in {:.0} s from seed {seed}", target.name, started.elapsed().as_secs_f64());
    true
}
