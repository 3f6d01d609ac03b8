//! Decode steps as CUDA graphs: one launch instead of two hundred.
//!
//! A graph has fixed shapes, so a step is padded to the next of a few shapes. The first step of a shape runs launch
//! by launch, which loads its kernels and lets cuBLASLt choose; the second is captured; later ones are replays.

use super::step::Step;
use crate::cuda::Graph;
use crate::exec::Exec;
use crate::tensor::OpError;
use std::collections::HashMap;
use std::hash::Hash;

/// Batch sizes that have a graph.
pub const GRAPH_SIZES: [usize; 22] =
    [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256];

/// Launches of a step between its inputs and its logits, which a graph holds.
pub trait Launches {
    /// Where they are launched.
    fn exec(&mut self) -> &mut Exec;

    /// Launches them.
    fn launch(&mut self) -> Result<(), OpError>;
}

/// The graphs so far, by the shape `K` of their steps: by default the number of rows, each of which decodes one token.
#[derive(Debug)]
pub struct Graphs<K = usize> {
    /// Rows of the largest graph; 0 for none.
    max_rows: usize,
    /// Whether graphs are made of steps; otherwise steps are only padded.
    makes: bool,
    /// By shape.
    graphs: HashMap<K, Entry>,
}

/// What there is for steps of one shape, of which one has run.
#[derive(Debug, Default)]
struct Entry {
    /// `None` until it is captured.
    graph: Option<Graph>,
    /// Its launches so far.
    replays: u64,
}

impl Graphs {
    /// The size to pad `step` to; `None` when it runs launch by launch: not every row is one token that is sampled, or
    /// there are too many.
    pub fn size<M: Clone + Default>(&self, step: &Step<M>) -> Option<usize> {
        let rows = step.rows.len();
        let decodes = step.tokens.len() == rows && step.samples.len() == rows;
        self.rows(step).filter(|_| decodes)
    }
}

impl<K: Copy + Eq + Hash> Graphs<K> {
    /// Graphs for steps of up to `max_rows` rows.
    pub fn new(max_rows: usize) -> Self {
        Self { max_rows, makes: true, graphs: HashMap::new() }
    }

    /// Pads steps of up to `max_rows` rows as for graphs, but runs them launch by launch: for tests of padded steps on devices
    /// without graphs.
    pub fn padding_only(max_rows: usize) -> Self {
        Self { makes: false, ..Self::new(max_rows) }
    }

    /// Graphs captured so far.
    pub fn captured(&self) -> usize {
        self.graphs.values().filter(|entry| entry.graph.is_some()).count()
    }

    /// Steps that ran as a graph so far.
    pub fn replays(&self) -> u64 {
        self.replays_of(|_| true)
    }

    /// Steps that ran as a graph of one of these shapes so far.
    pub fn replays_of(&self, is_counted: impl Fn(&K) -> bool) -> u64 {
        self.graphs.iter().filter(|(key, _)| is_counted(key)).map(|(_, entry)| entry.replays).sum()
    }

    /// The number of rows to pad `step` to, one of [`GRAPH_SIZES`]; `None` when it runs launch by launch whatever its tokens
    /// are: there are no rows or too many. How rows are sampled does not matter: no graph samples.
    pub fn rows<M>(&self, step: &Step<M>) -> Option<usize> {
        let rows = step.rows.len();
        let size = GRAPH_SIZES.into_iter().find(|size| *size >= rows).filter(|size| *size <= self.max_rows);
        size.filter(|_| rows > 0)
    }

    /// Runs `pass`, a step of shape `key`, or of any if that is `None`: then launch by launch.
    pub fn run(&mut self, key: Option<K>, pass: &mut impl Launches) -> Result<(), OpError> {
        self.capture(key, pass)?;
        match key.and_then(|key| self.next(key)) {
            Some(graph) => pass.exec().replay(graph),
            None => pass.launch(),
        }
    }

    /// Whether the next step of shape `key` is captured before it runs: it is the second one.
    pub fn captures(&self, key: Option<K>) -> bool {
        self.makes && key.is_some_and(|key| self.graphs.get(&key).is_some_and(|entry| entry.graph.is_none()))
    }

    /// Captures `pass`, where [`captures`](Self::captures) says so, and does not run it: the next [`run`](Self::run) does. Ranks
    /// that wait for each other on their devices call it first, all of them, because making a graph may wait for the device.
    pub fn capture(&mut self, key: Option<K>, pass: &mut impl Launches) -> Result<(), OpError> {
        let Some(key) = key.filter(|_| self.captures(key)) else { return Ok(()) };
        pass.exec().begin_capture()?;
        let launched = pass.launch();
        let graph = pass.exec().end_capture().and_then(|graph| launched.map(|()| graph));
        self.keep(key, graph);
        Ok(())
    }

    /// The graph of a step of shape `key`. The first step has none, and is counted.
    fn next(&mut self, key: K) -> Option<&Graph> {
        let Entry { graph, replays } = self.graphs.entry(key).or_default();
        *replays += u64::from(graph.is_some());
        graph.as_ref()
    }

    /// Keeps what a capture gave. Where capturing fails, steps run without graphs from now on.
    fn keep(&mut self, key: K, graph: Result<Graph, OpError>) {
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
        let graphs = Graphs::new(64);
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
        assert_eq!(Graphs::new(0).size(&Step::<()>::uniform(16, 1, 1, 100)), None, "switched off");
    }

    #[test]
    fn rows_of_several_tokens_are_padded_where_shapes_allow_for_them() {
        let graphs = Graphs::<(usize, usize)>::new(64);
        assert_eq!(graphs.rows(&Step::<()>::uniform(16, 5, 3, 100)), Some(6));
        assert_eq!(graphs.rows(&Step::<()>::default()), None, "no rows");
        let mut padding = Graphs::padding_only(64);
        assert!(padding.next((6, 3)).is_none() && !padding.captures(Some((6, 3))));
        assert_eq!((padding.rows(&Step::<()>::uniform(16, 5, 3, 100)), padding.replays()), (Some(6), 0));
    }

    #[test]
    fn a_size_runs_once_before_it_is_captured_and_a_failure_ends_it() {
        let mut graphs = Graphs::<usize>::new(64);
        assert!(!graphs.captures(None) && !graphs.captures(Some(8)));
        assert!(graphs.next(8).is_none());
        assert!(graphs.captures(Some(8)) && !graphs.captures(Some(4)));
        graphs.keep(8, Err(OpError { op: "graph", message: "no".to_owned() }));
        assert_eq!(graphs.size(&Step::<()>::uniform(16, 8, 1, 100)), None);
    }
}
