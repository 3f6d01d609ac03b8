//! `pegainfer replay --schedule`: the scheduler plans the steps of a recording again.

use super::file::open;
use crate::recording::format::RecordLine;
use anyhow::{Context, Result};
use pegainfer_core::schedule::recording::{Replayed, replay};
use pegainfer_terminal::stdout::print;
use std::path::Path;

/// Runs the command.
pub fn run(file: &Path) -> Result<()> {
    let name = file.display();
    let (header, mut lines) = open(file)?;
    let (mut broken, mut missing) = (None, 0);
    let events = std::iter::from_fn(|| {
        loop {
            match lines.next()? {
                Ok(RecordLine::Schedule(event)) => return Some(event),
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
    let Replayed { requests, steps, rows, tokens, preemptions, prefix_hits } = replayed?;
    print(&format!("{name}: recorded with {} {}\n", header.model, header.version))?;
    print(&format!(
        "{steps} steps of {requests} requests were planned as recorded: {rows} rows, {tokens} tokens, {prefix_hits} cached, \
         {preemptions} preemptions\n"
    ))?;
    if missing > 0 {
        log::warn!(
            "{name}: {missing} lines after step {steps} were not recorded; the schedule is replayed up to there"
        );
    }
    Ok(())
}
