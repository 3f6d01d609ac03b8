//! Target of an engine under test.

use pegainfer_core::cuda::device_count;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use std::fmt;

/// Target of an engine under test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    Cpu(Isa),
    Cuda,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(isa) => write!(f, "{isa}"),
            Self::Cuda => f.write_str("cuda"),
        }
    }
}

/// True if a GPU may replay graphs.
pub fn cuda_graph() -> bool {
    std::env::var("PEGAINFER_TEST_CUDA_GRAPH").as_deref() != Ok("false")
}

/// All instruction-set paths of this machine, slowest first; or its GPU with `PEGAINFER_TEST_DEVICE=cuda`.
pub fn targets() -> Vec<Target> {
    match std::env::var("PEGAINFER_TEST_DEVICE").as_deref() {
        Ok("cuda") => vec![Target::Cuda],
        Err(_) | Ok("cpu") => Isa::available().into_iter().map(Target::Cpu).collect(),
        Ok(other) => panic!("PEGAINFER_TEST_DEVICE={other}: expected cpu or cuda"),
    }
}

impl Target {
    /// A device to load an engine on, for a test next to which others run: a CPU computes with one thread.
    pub fn exec(self) -> Exec {
        self.exec_with(1)
    }

    /// A device to load an engine on. A CPU computes with `threads` threads.
    pub fn exec_with(self, threads: usize) -> Exec {
        match self {
            Self::Cpu(isa) => Exec::cpu(isa, Some(threads)).unwrap(),
            Self::Cuda => Exec::cuda(0, None).unwrap(),
        }
    }

    /// Devices for the ranks of an engine: on the CPU, or one GPU each.
    pub fn execs(self, ranks: usize) -> Vec<Exec> {
        let exec = |rank| match self {
            Self::Cpu(isa) => Exec::cpu(isa, Some(1)).unwrap(),
            Self::Cuda => Exec::cuda(rank, None).unwrap(),
        };
        (0..ranks).map(exec).collect()
    }
}

/// Numbers of ranks to test in addition to one, of `counts`; limited by the number of GPUs if they run on GPUs.
pub fn rank_counts(counts: &[usize]) -> Vec<usize> {
    let max_ranks = match best() {
        Target::Cpu(_) => usize::MAX,
        Target::Cuda => device_count().unwrap(),
    };
    let (tested, skipped): (Vec<_>, Vec<_>) = counts.iter().copied().partition(|ranks| *ranks <= max_ranks);
    println!("ranks: {tested:?}, without the GPUs for {skipped:?}");
    tested
}

/// The fastest of [`targets`].
pub fn best() -> Target {
    *targets().last().unwrap()
}
