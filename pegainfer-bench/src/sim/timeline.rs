//! The steps of a simulation in Chrome's trace format, for <https://ui.perfetto.dev>.

use super::device::SimulatedStep;
use serde_json::json;
use std::io::{self, Write};

/// Writes one event for each step, named by its kind; each engine has a row.
pub fn write(steps: &[SimulatedStep], out: &mut impl Write) -> io::Result<()> {
    write!(out, "[")?;
    for (i, SimulatedStep { begin, end, load, engine }) in steps.iter().enumerate() {
        let event = json!({
            "name": load.kind().name(),
            "ph": "X",
            "pid": 1,
            "tid": 1 + engine,
            "ts": begin.as_nanos() as f64 / 1e3,
            "dur": (*end - *begin).as_nanos() as f64 / 1e3,
            "args": load,
        });
        writeln!(out, "{}{event}", if i == 0 { "" } else { "," })?;
    }
    writeln!(out, "]")?;
    out.flush()
}
