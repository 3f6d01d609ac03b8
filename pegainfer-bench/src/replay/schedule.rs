//! `pegainfer replay --schedule`: the scheduler plans the steps of a recording again.

use super::file::open;
use crate::recording::format::RecordLine;
use anyhow::{Context, Result};
use pegainfer_core::schedule::recording::{Replayed, replay};
use pegainfer_terminal::stdout::print;
use std::path::Path;

/// The steps of one engine in a recording, planned again.
struct EngineReplay {
    model: String,
    version: String,
    replayed: Replayed,
    /// Lines missing after the last step.
    missing: u64,
    /// Number of engines in the lines that were read.
    engines: usize,
}

/// Runs the command.
pub fn run(file: &Path) -> Result<()> {
    let name = file.display();
    let (mut engine, mut engines) = (0, 1);
    while engine < engines {
        let EngineReplay { model, version, replayed, missing, engines: seen } = replay_engine(file, engine)?;
        engines = engines.max(seen);
        let Replayed { requests, steps, rows, tokens, preemptions, prefix_hits } = replayed;
        if engine == 0 {
            print(&format!("{name}: recorded with {model} {version}\n"))?;
        }
        if engines > 1 {
            print(&format!("engine {engine}: "))?;
        }
        print(&format!(
            "{steps} steps of {requests} requests were planned as recorded: {rows} rows, {tokens} tokens, {prefix_hits} \
             cached, {preemptions} preemptions\n"
        ))?;
        if missing > 0 {
            log::warn!(
                "{name}: {missing} lines after step {steps} were not recorded; the schedule is replayed up to there"
            );
        }
        engine += 1;
    }
    Ok(())
}

/// Plans the steps of one engine again.
fn replay_engine(file: &Path, engine: usize) -> Result<EngineReplay> {
    let name = file.display();
    let (header, mut lines) = open(file)?;
    let (mut broken, mut missing, mut engines) = (None, 0, 1);
    let events = std::iter::from_fn(|| {
        loop {
            match lines.next()? {
                Ok(RecordLine::Schedule(line)) => {
                    engines = engines.max(line.engine_number + 1);
                    if line.engine_number == engine {
                        return Some(line.event);
                    }
                }
                Ok(RecordLine::Added(_) | RecordLine::Ended(_)) => {}
                // Later steps depend on the missing lines.
                Ok(RecordLine::Gap { gap }) => {
                    missing = gap;
                    return None;
                }
                Err(error) => {
                    broken = Some(error);
                    return None;
                }
            }
        }
    });
    let replayed = replay(events).with_context(|| format!("{name}"));
    if let Some(error) = broken {
        return Err(error);
    }
    let (model, version) = (header.model, header.version);
    Ok(EngineReplay { model, version, replayed: replayed?, missing, engines })
}
