//! Runs a target on blind mutations of its seeds: without coverage guidance, but with any compiler.

use pegainfer_fuzz::TARGETS;
use pegainfer_fuzz::mutate::{Rng, mutate};
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "pegainfer-fuzz TARGET [--seconds N] [--seed N]\ntargets: requests, conversations, outputs";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |flag: &str, default: u64| match args.iter().position(|arg| arg == flag) {
        Some(at) => args.get(at + 1).and_then(|value| value.parse().ok()),
        None => Some(default),
    };
    let target = TARGETS.iter().find(|target| args.first().is_some_and(|name| name == target.name));
    let (Some(target), Some(seconds), Some(seed)) = (target, number("--seconds", 60), number("--seed", 1)) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    let (seeds, mut rng) = ((target.seeds)(), Rng(seed));
    let (started, mut runs) = (Instant::now(), 0u64);
    while started.elapsed() < Duration::from_secs(seconds) {
        let data = if runs < seeds.len() as u64 { seeds[runs as usize].clone() } else { mutate(&seeds, &mut rng) };
        if catch_unwind(|| (target.check)(&data)).is_err() {
            let path = format!("{}-{seed}-{runs}.input", target.name);
            let kept = std::fs::write(&path, &data).map_or_else(|e| e.to_string(), |()| format!("it is in {path}"));
            eprintln!("input {runs} of seed {seed} violates the property; {kept}");
            return ExitCode::FAILURE;
        }
        runs += 1;
    }
    println!("{}: {runs} inputs in {:.0} s from seed {seed}", target.name, started.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}
