//! Decode steps as CUDA graphs: one launch instead of two hundred.
//!
//! A graph has fixed shapes, so a step is padded to the next larger shape. The first step of a shape runs launch by
//! launch, which loads its kernels and lets cuBLASLt choose algorithms. The second step is captured; later ones are
//! replays.

use super::step::Step;
use crate::cuda::Graph;
use crate::exec::Exec;
use crate::tensor::OpError;
use std::collections::HashMap;
use std::hash::Hash;

/// Batch sizes that have a graph.
pub const GRAPH_SIZES: [usize; 22] =
    [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256];

/// The launches of a step between its inputs and its logits, as captured in a graph.
pub trait Launches {
    /// Execution context of the launches.
    fn exec(&mut self) -> &mut Exec;

    /// Launches them.
    fn launch(&mut self) -> Result<(), OpError>;
}

/// CUDA graphs by step shape `K`. The default `K` is the number of rows, each of which decodes one token.
#[derive(Debug)]
pub struct Graphs<K = usize> {
    /// Rows of the largest graph; 0 disables graphs.
    max_rows: usize,
    /// True if steps are captured; otherwise they are only padded.
    makes: bool,
    /// Graphs by shape.
    graphs: HashMap<K, Entry>,
}

/// The graph of one shape, of which a step has run or was expected.
#[derive(Debug, Default)]
struct Entry {
    /// The graph, once one was captured.
    graph: Option<Graph>,
    /// Number of replays.
    replays: u64,
}

impl<K: Copy + Eq + Hash> Graphs<K> {
    /// Graphs for steps of up to `max_rows` rows.
    pub fn new(max_rows: usize) -> Self {
        Self { max_rows, makes: true, graphs: HashMap::new() }
    }

    /// Pads steps of up to `max_rows` rows as for graphs, but runs them launch by launch: for tests of padded steps on
    /// devices without graphs.
    pub fn padding_only(max_rows: usize) -> Self {
        Self { makes: false, ..Self::new(max_rows) }
    }

    /// Number of captured graphs.
    pub fn captured(&self) -> usize {
        self.graphs.values().filter(|entry| entry.graph.is_some()).count()
    }

    /// Number of steps that ran as a graph.
    pub fn replays(&self) -> u64 {
        self.replays_of(|_| true)
    }

    /// Number of steps that ran as a graph of one of these shapes.
    pub fn replays_of(&self, is_counted: impl Fn(&K) -> bool) -> u64 {
        self.graphs.iter().filter(|(key, _)| is_counted(key)).map(|(_, entry)| entry.replays).sum()
    }

    /// Number of rows to pad `step` to, one of [`GRAPH_SIZES`], for rows of any number of tokens. `None` if there are
    /// no rows or too many. Sampling does not matter: no graph samples.
    pub fn rows<M>(&self, step: &Step<M>) -> Option<usize> {
        let rows = step.rows.len();
        let size = GRAPH_SIZES.into_iter().find(|size| *size >= rows).filter(|size| *size <= self.max_rows);
        size.filter(|_| rows > 0)
    }

    /// Number of rows to pad `step` to. `None` if the step runs launch by launch: a row has more than one token or is
    /// not sampled, or there are too many rows.
    pub fn size<M: Clone + Default>(&self, step: &Step<M>) -> Option<usize> {
        let rows = step.rows.len();
        let decodes = step.tokens.len() == rows && step.samples.len() == rows;
        self.rows(step).filter(|_| decodes)
    }

    /// The kernels of steps of shape `key` are loaded, so the first one is captured.
    pub fn expect(&mut self, key: K) {
        self.graphs.entry(key).or_default();
    }

    /// Runs `pass`, a step of shape `key`. If that is `None`, the step has any shape and runs launch by launch.
    pub fn run(&mut self, key: Option<K>, pass: &mut impl Launches) -> Result<(), OpError> {
        self.capture(key, pass)?;
        match key.and_then(|key| self.graph_for(key)) {
            Some(graph) => pass.exec().replay(graph),
            None => pass.launch(),
        }
    }

    /// True if the next step of shape `key` is to be captured: the second one, or the first if it was
    /// [expected](Self::expect).
    pub fn should_capture(&self, key: Option<K>) -> bool {
        self.makes && key.is_some_and(|key| self.graphs.get(&key).is_some_and(|entry| entry.graph.is_none()))
    }

    /// Captures `pass` if [`should_capture`](Self::should_capture) says so; the next [`run`](Self::run) runs it. Ranks
    /// that wait for each other on their devices all call it first, because capturing may wait for the device.
    pub fn capture(&mut self, key: Option<K>, pass: &mut impl Launches) -> Result<(), OpError> {
        let Some(key) = key.filter(|_| self.should_capture(key)) else { return Ok(()) };
        pass.exec().begin_capture()?;
        let launched = pass.launch();
        let graph = pass.exec().end_capture().and_then(|graph| launched.map(|()| graph));
        self.store(key, graph);
        Ok(())
    }

    /// Graph of a step of shape `key`. The first step has none and is counted.
    fn graph_for(&mut self, key: K) -> Option<&Graph> {
        let Entry { graph, replays } = self.graphs.entry(key).or_default();
        *replays += u64::from(graph.is_some());
        graph.as_ref()
    }

    /// Stores a captured graph. If capturing failed, steps run without graphs from now on.
    fn store(&mut self, key: K, graph: Result<Graph, OpError>) {
        match graph {
            Ok(graph) => {
                self.graphs.insert(key, Entry { graph: Some(graph), replays: 0 });
            }
            Err(error) => {
                log::warn!("CUDA graphs are off, steps will be slower: {error}");
                *self = Self::padding_only(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logits_processors::LogitsUpdate;
    use crate::sampling::SamplingParams;
    use crate::schedule::SampleRow;

    #[test]
    fn decode_steps_are_padded_however_they_are_sampled() {
        let graphs = Graphs::<usize>::new(64);
        let size = |step: &Step<()>| graphs.size(step);
        assert_eq!(size(&Step::<()>::uniform(16, 1, 1, 100)), Some(1));
        assert_eq!(size(&Step::<()>::uniform(16, 33, 1, 100)), Some(40));
        assert_eq!(size(&Step::<()>::uniform(16, 65, 1, 100)), None, "larger than the largest graph");
        assert_eq!(size(&Step::<()>::uniform(16, 2, 3, 100)), None, "prefill");
        let mut reported = Step::<()>::uniform(16, 2, 1, 100);
        reported.samples[1].logprobs = Some(1);
        assert_eq!(size(&reported), Some(2));
        let mut processed = Step::<()>::uniform(16, 2, 1, 100);
        processed.samples[0].logits_update = Some(LogitsUpdate::default());
        assert_eq!(size(&processed), Some(2));
        let mut drawn = Step::<()>::uniform(16, 2, 1, 100);
        drawn.samples[0] = SampleRow::of_prompt(drawn.rows[0].id, 0, 100, 7, Some(3));
        drawn.samples[1].params = SamplingParams::new(0.9, 40, 0.95, 0.01, 1).unwrap();
        drawn.samples[1].deferred = true;
        assert_eq!(size(&drawn), Some(2), "a prompt's token, and a draw that waits for a mask");
        assert_eq!(Graphs::<usize>::new(0).size(&Step::<()>::uniform(16, 1, 1, 100)), None, "switched off");
    }

    #[test]
    fn rows_of_several_tokens_are_padded_where_shapes_allow_for_them() {
        let graphs = Graphs::<(usize, usize)>::new(64);
        assert_eq!(graphs.rows(&Step::<()>::uniform(16, 5, 3, 100)), Some(6));
        assert_eq!(graphs.rows(&Step::<()>::default()), None, "no rows");
        let mut padding = Graphs::padding_only(64);
        assert!(padding.graph_for((6, 3)).is_none() && !padding.should_capture(Some((6, 3))));
        assert_eq!((padding.rows(&Step::<()>::uniform(16, 5, 3, 100)), padding.replays()), (Some(6), 0));
    }

    #[test]
    fn a_size_runs_once_before_it_is_captured_and_a_failure_ends_it() {
        let mut graphs = Graphs::<usize>::new(64);
        assert!(!graphs.should_capture(None) && !graphs.should_capture(Some(8)));
        assert!(graphs.graph_for(8).is_none());
        assert!(graphs.should_capture(Some(8)) && !graphs.should_capture(Some(4)));
        graphs.store(8, Err(OpError { op: "graph", message: "no".to_owned() }));
        assert_eq!(graphs.size(&Step::<()>::uniform(16, 8, 1, 100)), None);
    }
}
