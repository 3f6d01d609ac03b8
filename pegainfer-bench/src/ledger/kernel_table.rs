//! Tables of the kernels of measured steps, in the order of completion.

use pegainfer_core::ledger::{KernelLine, Ledger, StepLoad};
use std::fmt::Write;

/// Maximum number of shown characters of a kernel's name; library kernels have hundreds.
const NAME: usize = 72;

/// A table for each step with recorded kernels.
pub fn kernel_tables(ledger: &Ledger) -> String {
    let mut loads: Vec<StepLoad> = ledger.kernels.iter().map(|line| line.load).collect();
    loads.dedup();
    loads.into_iter().map(|load| kernel_table(ledger, load)).collect()
}

/// The table of one step, with a line for each kernel and grid.
fn kernel_table(ledger: &Ledger, load: StepLoad) -> String {
    let kernels: Vec<&KernelLine> = ledger.kernels.iter().filter(|line| line.load == load).collect();
    let (calls, us) = kernels.iter().fold((0, 0.0), |(calls, us), line| (calls + line.calls, us + line.us));
    let step = ledger.steps.iter().find(|line| line.load == load);
    let step = step.map(|line| format!("{:.1} us a step without CUPTI; ", line.us)).unwrap_or_default();
    let mut out = format!("\n{load}: {step}with it {us:.1} us, what {calls} kernels add in the order of their ends\n");
    let _ = writeln!(
        out,
        "{:>10} {:>6} {:>5} {:>9} {:>9} {:>9}  {:<14} kernel",
        "adds us", "share", "calls", "us each", "idle us", "own us", "grid"
    );
    for line in kernels {
        let KernelLine { kernel, grid: [x, y, z], calls, idle_us, own_us, .. } = line;
        let (each, share) = (line.us / (*calls).max(1) as f64, 100.0 * line.us / us.max(f64::MIN_POSITIVE));
        let name: String = kernel.chars().take(NAME).collect();
        let (grid, us) = (format!("{x}x{y}x{z}"), line.us);
        let _ = writeln!(
            out,
            "{us:>10.1} {share:>5.1}% {calls:>5} {each:>9.2} {idle_us:>9.1} {own_us:>9.1}  {grid:<14} {name}"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_step_is_what_its_kernels_add() {
        let mut ledger = testing::ledger();
        assert_eq!(kernel_tables(&ledger), "");
        let load = ledger.steps[0].load;
        let line = |kernel: &str, calls, us| {
            let (kernel, grid) = (kernel.to_owned(), [132, 1, 2]);
            KernelLine { load, kernel, grid, calls, us, idle_us: 0.25, own_us: 2.0 * us }
        };
        ledger.kernels = vec![line("embedding", 1, 20.0), line(&"k".repeat(100), 36, 180.0)];
        let table = kernel_tables(&ledger);
        let lines: Vec<&str> = table.trim_start().lines().collect();
        let words = |i: usize| lines[i].split_whitespace().collect::<Vec<_>>();
        assert!(lines[0].contains("2159.6 us a step without CUPTI; with it 200.0 us, what 37 kernels add"), "{table}");
        assert_eq!(words(2), ["20.0", "10.0%", "1", "20.00", "0.2", "40.0", "132x1x2", "embedding"]);
        assert_eq!(words(3)[3..], ["5.00", "0.2", "360.0", "132x1x2", &"k".repeat(NAME)]);
    }
}
