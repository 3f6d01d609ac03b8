//! The table of a public benchmark: the columns that it publishes.

use super::report::{Report, Row, milliseconds, number, write_problems};
use std::fmt::Write;

/// Width of the columns before the first line.
const WIDTH: usize = 30;

/// The report as a table, if its rows are cells of a public benchmark.
pub fn table(report: &Report) -> Option<String> {
    let mut out = format!("{}: {}", report.device, report.cells.as_ref()?);
    let _ = writeln!(
        out,
        "{:>8} {:>8} {:>12} |{:>12} {:>12} |{:>14} {:>12}",
        "prompt", "output", "concurrency", "TTFT p50 ms", "TPOT p50 ms", "in+out tok/s", "out tok/s"
    );
    for Row { point, median, .. } in &report.rows {
        let (_, _, concurrency) = point.place();
        let _ = writeln!(
            out,
            "{:>8} {:>8} {concurrency:>12} |{:>12} {:>12} |{:>14} {:>12}",
            point.prompt_len,
            point.output_len,
            milliseconds(median.ttft_ms.p50),
            milliseconds(median.tpot_ms.p50),
            number(median.total_tok_s, 1),
            number(median.output_tok_s, 1)
        );
        write_problems(&mut out, WIDTH, median);
    }
    Some(out)
}
