//! A failure gives one error sentence, and the engine continues.

use crate::support::process::in_own_process;
use crate::support::{Target, best, engine, fails_a_step, options};
use pegainfer_core::isa::Isa;
use pegainfer_qwen35_4b::Qwen35;
use pegainfer_runtime::{LoadOptions, load};

#[test]
fn a_refused_request_ends_alone_unless_the_device_is_lost() {
    in_own_process(|| fails_a_step(&mut engine(best(), &options()), best()));
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    for (options, expected) in [
        (LoadOptions { max_model_len: Some(5000), ..options() }, "--max-model-len is 5000"),
        (LoadOptions { max_num_seqs: Some(0), ..options() }, "--max-num-seqs is 0"),
        (LoadOptions { state_cache_interval: 40, ..options() }, "--state-cache-interval is 40"),
        (LoadOptions { kv_cache_bytes: Some(1), ..options() }, "--kv-cache-memory gives 0"),
        (LoadOptions { model_path: "/nowhere".into(), ..options() }, "cannot read /nowhere/config.json"),
    ] {
        let exec = Target::Cpu(Isa::best()).exec();
        let error = load::<Qwen35>(vec![exec], &options, &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}
