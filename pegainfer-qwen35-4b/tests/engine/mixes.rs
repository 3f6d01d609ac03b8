//! Each request of a mix of all sampling options gives the same result as alone; see [`crate::support::mixes`].

use crate::support::{Target, best, engine, mixes, options};
use pegainfer_runtime::LoadOptions;

#[test]
fn each_request_gives_what_it_gives_alone() {
    if best() == Target::Cuda {
        println!("not for a GPU, where sums depend on the batch: see the tests of invariance");
        return;
    }
    // Few blocks, so that sequences are preempted.
    let small = LoadOptions {
        kv_cache_bytes: Some(16 * 16 * 3072),
        max_num_seqs: Some(16),
        max_model_len: Some(128),
        ..options()
    };
    mixes::each_request_gives_what_it_gives_alone(2_000, |speculation| {
        engine(best(), &LoadOptions { speculation, ..small.clone() })
    });
}
