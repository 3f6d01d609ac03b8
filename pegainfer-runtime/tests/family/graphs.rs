//! Padded decode steps and CUDA graphs give the same results as steps launched one by one; see
//! [`crate::support::graphs`].

use crate::support::graphs::{self, Model, ROWS};
use crate::support::{Engine, Family, best, engine, fixture, options};
use pegainfer_runtime::{Executor, LoadOptions, padded, ragged};

fn load(cuda_graph: bool) -> Engine {
    engine(best(), &LoadOptions { cuda_graph, max_num_seqs: Some(ROWS), ..options() })
}

#[test]
fn graph_equals_eager() {
    let model = Model {
        ragged: ragged::<Family>,
        padded: padded::<Family>,
        replays: |executor: &Executor<_>| executor.graph_replays().decode,
    };
    graphs::graph_equals_eager(load, &model);
}

#[test]
fn served_text_is_that_without_graphs() {
    graphs::served_text_is_that_without_graphs(&fixture(), load);
}

#[test]
fn no_decode_step_runs_without_a_graph() {
    graphs::no_decode_step_runs_without_a_graph(load(true), |executor: &Executor<_>| executor.graph_replays().decode);
}
