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
        self.capture(size, pass)?;
        match size.and_then(|size| self.next(size)) {
            Some(graph) => pass.exec().replay(graph),
            None => pass.launch(),
        }
    }

    /// Whether the next step of `size` is captured before it runs: it is the second one.
    pub fn captures(&self, size: Option<usize>) -> bool {
        size.is_some_and(|size| matches!(self.graphs.get(&size), Some(None)))
    }

    /// Captures `pass`, where [`captures`](Self::captures) says so, and does not run it: the next [`run`](Self::run) does. Ranks
    /// that wait for each other on their devices call it first, all of them, because making a graph may wait for the device.
    pub fn capture(&mut self, size: Option<usize>, pass: &mut impl Launches) -> Result<(), OpError> {
        let Some(size) = size.filter(|_| self.captures(size)) else { return Ok(()) };
        pass.exec().begin_capture()?;
        let launched = pass.launch();
        let graph = pass.exec().end_capture().and_then(|graph| launched.map(|()| graph));
        self.captured(size, graph);
        Ok(())
    }

    /// The graph of a step of `size`. The first step has none, and is counted.
    fn next(&mut self, size: usize) -> Option<&Graph> {
        let graph = self.graphs.entry(size).or_insert(None).as_ref();
        self.replays += u64::from(graph.is_some());
        graph
    }

    /// Keeps what a capture gave. Where capturing fails, steps run without graphs from now on.
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
        assert!(!graphs.captures(None) && !graphs.captures(Some(8)));
        assert!(graphs.next(8).is_none());
        assert!(graphs.captures(Some(8)) && !graphs.captures(Some(4)));
        graphs.captured(8, Err(OpError { op: "graph", message: "no".to_owned() }));
        assert_eq!(graphs.size(&Step::<()>::uniform(16, 8, 1, 100)), None);
    }
}
