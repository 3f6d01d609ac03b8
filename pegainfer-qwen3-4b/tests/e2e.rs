//! The real engine against reference outputs, by the rule of [`support::e2e`]. transformers in bf16 needs 0.045 and
//! 0.30 for the bundled model.
//!
//! `PEGAINFER_TEST_MODEL_PATH` points these tests at another checkpoint that has a fixture.json of the same format;
//! `PEGAINFER_TEST_DEVICE=cuda` runs them on the GPU.

mod support;

use support::{Case, Target, best, e2e, engine, fixture, options};

/// On slower instruction sets, only the steps with known log-probabilities.
#[test]
fn every_step_agrees_with_the_reference() {
    let steps = |target: Target, case: &Case| if target == best() { case.greedy_ids.len() } else { case.top20.len() };
    e2e::every_step_agrees(&fixture(), |target| engine(target, &options()), steps, 200);
}

#[test]
fn greedy_text_equals_the_reference_up_to_its_first_close_call() {
    e2e::greedy_text_equals_the_reference(&fixture(), |target| engine(target, &options()));
}

#[test]
fn the_engine_thread_stops_at_end_of_text_and_forgets_cancelled_requests() {
    e2e::stops_at_end_of_text_and_forgets_cancelled_requests(&fixture(), |target| engine(target, &options()));
}
