//! Measures the time that each kernel adds to a served step: in replayed CUDA graphs, with overlap.

use super::measurable::Measurable;
use super::pipelined::Pipelined;
use pegainfer_core::exec::Device;
use pegainfer_core::ledger::{GridLimits, KernelLine, MeasureStep, Rows, StepLoad};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::cuda::cupti::{self, KernelRecord};
use std::collections::HashMap;

/// Recorded runs of a step, excluding the first and the last.
const RUNS: usize = 20;

/// Runs each step that fits while CUPTI is on, so that it records the captured CUDA graphs, then turns it off.
pub fn capture_graphs<E: Measurable>(executor: &mut E, limits: &GridLimits, steps: &[Rows]) -> Result<(), OpError> {
    if executor.exec().device() != Device::Cuda {
        return Err(error("CUPTI records the kernels of a GPU, and this engine runs on the CPU".to_owned()));
    }
    for rows in steps.iter().filter(|rows| limits.holds(rows)) {
        Pipelined(executor).run(rows, 3)?;
    }
    cupti::pause().map_err(error)
}

/// The kernels of these steps on the device of rank 0.
pub fn record_kernels<E: Measurable>(executor: &mut E, steps: &[Rows]) -> Result<Vec<KernelLine>, OpError> {
    let device = executor.exec().gpu()?.ordinal();
    let mut lines: Vec<KernelLine> = Vec::new();
    for rows in steps {
        let load = StepLoad::of_rows(rows.iter().copied());
        if lines.iter().any(|line| line.load == load) {
            continue;
        }
        let mut target = Pipelined(executor);
        let runs = target.runs(RUNS);
        let (result, mut kernels) = cupti::record(|| target.run(rows, RUNS)).map_err(error)?;
        result?;
        kernels.retain(|kernel| kernel.device as usize == device);
        lines.extend(lines_of(load, &kernels, runs).map_err(error)?);
    }
    Ok(lines)
}

fn error(message: String) -> OpError {
    OpError { op: "ledger", message }
}

/// Calls of one kernel in each run.
struct Calls<'a> {
    kernel: &'a KernelRecord,
    /// Calls and nanoseconds of each run: added, idle, own.
    runs: Vec<(usize, [u64; 3])>,
}

/// The kernels of a step, from those of `runs` runs in order of their start. Kernels that do not run in every run, such
/// as those that collect a statistic now and then, are left out.
fn lines_of(load: StepLoad, kernels: &[KernelRecord], runs: usize) -> Result<Vec<KernelLine>, String> {
    let mut counts: HashMap<(&str, [i32; 3]), usize> = HashMap::new();
    kernels.iter().for_each(|kernel| *counts.entry((&kernel.name, kernel.grid)).or_default() += 1);
    let rare = |kernel: &KernelRecord| counts[&(kernel.name.as_str(), kernel.grid)] < runs;
    let kernels: Vec<&KernelRecord> = kernels.iter().filter(|kernel| !rare(kernel)).collect();
    let in_run = kernels.len() / runs.max(1);
    if in_run == 0 || in_run * runs != kernels.len() {
        let uneven = counts.iter().filter(|(_, count)| **count > runs && !count.is_multiple_of(runs.max(1)));
        let mut uneven: Vec<String> = uneven.map(|((name, _), count)| format!("{name} {count} times")).collect();
        uneven.sort_unstable();
        let (count, uneven) = (kernels.len(), uneven.join(", "));
        return Err(format!("CUPTI recorded {count} kernels of {runs} runs of a step of {load}: {uneven}"));
    }
    let mut by_end: Vec<usize> = (0..kernels.len()).collect();
    by_end.sort_by_key(|i| kernels[*i].end);
    let mut calls: Vec<Calls<'_>> = Vec::new();
    let mut last_end = kernels[by_end[0]].start;
    for i in by_end {
        let kernel = kernels[i];
        let added = kernel.end - last_end.min(kernel.end);
        let idle = kernel.start.saturating_sub(last_end);
        last_end = last_end.max(kernel.end);
        let same = |calls: &Calls<'_>| (&calls.kernel.name, calls.kernel.grid) == (&kernel.name, kernel.grid);
        let found = calls.iter().position(same).unwrap_or_else(|| {
            calls.push(Calls { kernel, runs: vec![(0, [0; 3]); runs] });
            calls.len() - 1
        });
        let (count, sums) = &mut calls[found].runs[i / in_run];
        *count += 1;
        for (sum, time) in sums.iter_mut().zip([added, idle, kernel.end - kernel.start]) {
            *sum += time;
        }
    }
    calls.iter().map(|calls| line(load, calls)).collect()
}

/// Medians over the runs, without the first, which includes its launch, and the last.
fn line(load: StepLoad, Calls { kernel, runs }: &Calls<'_>) -> Result<KernelLine, String> {
    let count = runs[0].0;
    if runs.iter().any(|(other, _)| *other != count) {
        return Err(format!("the kernel {} does not run equally often in each run of a step of {load}", kernel.name));
    }
    let inner = if runs.len() > 2 { &runs[1..runs.len() - 1] } else { &runs[..] };
    let median = |which: usize| {
        let mut times: Vec<u64> = inner.iter().map(|(_, times)| times[which]).collect();
        times.sort_unstable();
        times[times.len() / 2] as f64 / 1e3
    };
    let (us, idle_us, own_us) = (median(0), median(1), median(2));
    Ok(KernelLine { load, kernel: kernel.name.clone(), grid: kernel.grid, calls: count, us, idle_us, own_us })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, start: u64, end: u64) -> KernelRecord {
        KernelRecord { name: name.to_owned(), grid: [1, 1, 1], device: 0, start, end }
    }

    /// Steps of 10 us: `a` for 4 us, `b` overlapped from 3 to 7, `a` from 8 to 9.
    fn step(at: u64) -> [KernelRecord; 3] {
        [kernel("a", at, at + 4000), kernel("b", at + 3000, at + 7000), kernel("a", at + 8000, at + 9000)]
    }

    #[test]
    fn what_kernels_add_sums_up_to_the_step() {
        let kernels: Vec<KernelRecord> = (0..6).flat_map(|i| step(10_000 * i)).collect();
        let lines = lines_of(StepLoad::default(), &kernels, 6).unwrap();
        let [a, b] = &lines[..] else { panic!("{lines:?}") };
        // 1 us between steps and 4 us of `a`, then 1 us of a pause and 1 us.
        assert_eq!((&a.kernel[..], a.calls, a.us, a.idle_us, a.own_us), ("a", 2, 7.0, 2.0, 5.0));
        assert_eq!((&b.kernel[..], b.calls, b.us, b.idle_us, b.own_us), ("b", 1, 3.0, 0.0, 4.0));
        assert_eq!(a.us + b.us, 10.0);
    }

    #[test]
    fn records_that_are_no_runs_of_one_step_are_refused() {
        let kernels: Vec<KernelRecord> = (0..3).flat_map(|i| step(10_000 * i)).collect();
        let refused = |kernels: &[KernelRecord]| lines_of(StepLoad::default(), kernels, 3).unwrap_err();
        let message = refused(&kernels[1..]);
        assert!(message.contains("8 kernels of 3 runs") && message.ends_with(": a 5 times"), "{message}");
        assert!(refused(&[]).contains("0 kernels"));
        let mut moved = kernels.clone();
        (moved[1].name, moved[3].name) = ("a".to_owned(), "b".to_owned());
        assert!(refused(&moved).contains("equally often"), "{}", refused(&moved));
    }

    #[test]
    fn kernels_that_run_now_and_then_are_left_out() {
        let mut kernels: Vec<KernelRecord> = (0..3).flat_map(|i| step(10_000 * i)).collect();
        let lines = lines_of(StepLoad::default(), &kernels, 3).unwrap();
        kernels.insert(4, kernel("statistic", 13_500, 13_600));
        let with = lines_of(StepLoad::default(), &kernels, 3).unwrap();
        assert_eq!(format!("{with:?}"), format!("{lines:?}"));
    }
}
