//! Tables of the ops of measured steps, longest first.

use pegainfer_core::ledger::{Ledger, OpLine, StepLoad};
use std::fmt::Write;

/// A table for each step with timed ops.
pub fn op_tables(ledger: &Ledger) -> String {
    let mut loads: Vec<StepLoad> = ledger.ops.iter().map(|line| line.load).collect();
    loads.dedup();
    loads.into_iter().map(|load| op_table(ledger, load)).collect()
}

/// The table of one step, with a line for each op, kernel and operands.
fn op_table(ledger: &Ledger, load: StepLoad) -> String {
    let mut ops: Vec<&OpLine> = ledger.ops.iter().filter(|line| line.load == load).collect();
    ops.sort_by(|a, b| b.us.total_cmp(&a.us));
    let (calls, us) = ops.iter().fold((0, 0.0), |(calls, us), line| (calls + line.calls, us + line.us));
    let steps = ledger.anchored_steps();
    let step = steps.iter().find(|line| line.load == load);
    let step = step.map(|line| format!("{:.3} ms a step; ", line.us / 1e3)).unwrap_or_default();
    let mut out = format!("\n{load}: {step}{calls} ops, {:.3} ms one after the other\n", us / 1e3);
    let _ = writeln!(
        out,
        "{:>10} {:>6} {:>5} {:>9}  {:<18} {:<16} operands",
        "us", "share", "calls", "us each", "op", "kernel"
    );
    for line in ops {
        let (each, share) = (line.us / line.calls.max(1) as f64, 100.0 * line.us / us.max(f64::MIN_POSITIVE));
        let OpLine { op, kernel, operands, calls, us, .. } = line;
        let text = format!("{us:>10.1} {share:>5.1}% {calls:>5} {each:>9.2}  {op:<18} {kernel:<16} {operands}");
        let _ = writeln!(out, "{}", text.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn the_longest_op_comes_first_and_the_shares_add_up() {
        let ledger = testing::ledger();
        let tables = op_tables(&ledger);
        let first = tables.split("\n\n").next().unwrap();
        assert!(first.contains("decode: 1 x 256 tokens of context: ") && first.contains(" ms a step; "), "{first}");
        let number =
            |line: &str, i: usize| line.split_whitespace().nth(i).unwrap().trim_end_matches('%').parse().unwrap();
        let lines: Vec<&str> = first.lines().skip_while(|line| !line.contains("us each")).skip(1).collect();
        let times: Vec<f64> = lines.iter().map(|line| number(line, 0)).collect();
        let shares: f64 = lines.iter().map(|line| number(line, 1)).sum();
        assert!(times.is_sorted_by(|a, b| a >= b) && (shares - 100.0).abs() < 0.5, "{first}");
        assert!(lines[0].contains("decode_layers"), "{first}");
    }
}
