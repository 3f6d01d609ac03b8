//! Decode steps as CUDA graphs: one launch instead of two hundred.
//!
//! A graph has fixed shapes, so a step is padded to the next of a few batch sizes. The first step of a size runs launch
//! by launch, which loads its kernels and lets cuBLASLt choose; the second is captured; later ones are replays.

use super::step::Step;
use crate::cuda::Graph;
use crate::exec::Exec;
use crate::tensor::OpError;
use std::collections::HashMap;

/// Batch sizes that have a graph.
pub const GRAPH_SIZES: [usize; 22] =
    [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256];

/// What a graph is made of: the launches of a step between its inputs and its tokens.
pub trait Launches {
    /// Where they are launched.
    fn exec(&mut self) -> &mut Exec;

    /// Launches them.
    fn launch(&mut self) -> Result<(), OpError>;
}

/// The graphs so far.
#[derive(Debug)]
pub struct Graphs {
    /// Rows of the largest graph; 0 for none.
    max_rows: usize,
    /// By size; `None` after its first step.
    graphs: HashMap<usize, Option<Graph>>,
    /// Launches of graphs.
    replays: u64,
}

/// How a step of a size runs.
enum Run<'a> {
    /// Launch by launch.
    Eager,
    /// Launch by launch, recorded: see [`Graphs::captured`].
    Capture,
    /// As it was captured.
    Replay(&'a Graph),
}

impl Graphs {
    /// Graphs for steps of up to `max_rows` rows.
    pub fn new(max_rows: usize) -> Self {
        Self { max_rows, graphs: HashMap::new(), replays: 0 }
    }

    /// Steps that ran as a graph so far.
    pub fn replays(&self) -> u64 {
        self.replays
    }

    /// The size to pad `step` to; `None` when it runs launch by launch: not every row is one token that is sampled, a
    /// row asks for log-probabilities or has logits processors, or it is too large.
    pub fn size<M: Clone + Default>(&self, step: &Step<M>) -> Option<usize> {
        let rows = step.rows.len();
        let decodes = rows > 0 && step.tokens.len() == rows && step.samples.len() == rows;
        let plain = step.samples.iter().all(|sample| sample.logprobs.is_none() && sample.logits_update.is_none());
        let size = GRAPH_SIZES.into_iter().find(|size| *size >= rows).filter(|size| *size <= self.max_rows);
        size.filter(|_| decodes && plain)
    }

    /// Runs `pass`, a step of `size`, or of any if that is `None`: then launch by launch.
    pub fn run(&mut self, size: Option<usize>, pass: &mut impl Launches) -> Result<(), OpError> {
        match (self.next(size), size) {
            (Run::Replay(graph), _) => return pass.exec().replay(graph),
            (Run::Capture, Some(size)) => {
                pass.exec().begin_capture()?;
                let launched = pass.launch();
                let graph = pass.exec().end_capture().and_then(|graph| launched.map(|()| graph));
                if let Ok(graph) = &graph {
                    pass.exec().replay(graph)?;
                    self.replays += 1;
                }
                let captured = graph.is_ok();
                self.captured(size, graph);
                if captured {
                    return Ok(());
                }
            }
            _ => {}
        }
        pass.launch()
    }

    /// How the next step of `size` runs; `None` is a step without a graph.
    fn next(&mut self, size: Option<usize>) -> Run<'_> {
        let Some(size) = size else { return Run::Eager };
        let seen = self.graphs.contains_key(&size);
        match self.graphs.entry(size).or_insert(None) {
            Some(graph) => {
                self.replays += 1;
                Run::Replay(graph)
            }
            None if seen => Run::Capture,
            None => Run::Eager,
        }
    }

    /// Keeps what [`Run::Capture`] gave. Where capturing fails, steps run without graphs from now on.
    fn captured(&mut self, size: usize, graph: Result<Graph, OpError>) {
        match graph {
            Ok(graph) => {
                self.graphs.insert(size, Some(graph));
            }
            Err(error) => {
                log::warn!("CUDA graphs are off, steps will be slower: {error}");
                *self = Self::new(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logits_processors::LogitsUpdate;

    #[test]
    fn only_plain_decode_steps_are_padded() {
        let graphs = Graphs::new(64);
        let size = |step: &Step<()>| graphs.size(step);
        assert_eq!(size(&Step::<()>::uniform(16, 1, 1, 100)), Some(1));
        assert_eq!(size(&Step::<()>::uniform(16, 33, 1, 100)), Some(40));
        assert_eq!(size(&Step::<()>::uniform(16, 65, 1, 100)), None, "larger than the largest graph");
        assert_eq!(size(&Step::<()>::uniform(16, 2, 3, 100)), None, "prefill");
        let mut reported = Step::<()>::uniform(16, 2, 1, 100);
        reported.samples[1].logprobs = Some(1);
        assert_eq!(size(&reported), None);
        let mut processed = Step::<()>::uniform(16, 2, 1, 100);
        processed.samples[0].logits_update = Some(LogitsUpdate::default());
        assert_eq!(size(&processed), None);
        assert_eq!(Graphs::new(0).size(&Step::<()>::uniform(16, 1, 1, 100)), None, "switched off");
    }

    #[test]
    fn a_size_runs_once_before_it_is_captured_and_a_failure_ends_it() {
        let mut graphs = Graphs::new(64);
        assert!(matches!(graphs.next(None), Run::Eager));
        assert!(matches!(graphs.next(Some(8)), Run::Eager));
        assert!(matches!(graphs.next(Some(8)), Run::Capture));
        assert!(matches!(graphs.next(Some(4)), Run::Eager));
        graphs.captured(8, Err(OpError { op: "graph", message: "no".to_owned() }));
        assert_eq!(graphs.size(&Step::<()>::uniform(16, 8, 1, 100)), None);
    }
}
