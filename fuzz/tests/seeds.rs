//! The property of each target holds for every seed and for a few mutations of it.

use pegainfer_fuzz::TARGETS;
use pegainfer_fuzz::mutate::{Rng, mutate};

/// Number of mutations of a target's seeds.
const MUTATIONS: usize = 20;

#[test]
fn seeds_and_some_mutations_have_the_property() {
    for target in &TARGETS {
        let (seeds, mut rng) = ((target.seeds)(), Rng(1));
        assert!(!seeds.is_empty(), "{} has no seeds", target.name);
        println!("{}", target.name);
        seeds.iter().for_each(|seed| (target.check)(seed));
        seeds.iter().filter_map(|seed| with_unknown_field(seed)).for_each(|seed| (target.check)(&seed));
        (0..MUTATIONS).for_each(|_| (target.check)(&mutate(&seeds, &mut rng)));
    }
}

/// A seed that ends in an object, with an unknown field added: a number too large for f64.
fn with_unknown_field(seed: &[u8]) -> Option<Vec<u8>> {
    Some([seed.strip_suffix(b"}")?, br#","unknown":1e999}"#].concat())
}
