use super::*;
use crate::kv::Naming;

fn chain(first: u32, blocks: u32) -> Vec<(ContentName, Option<ContentName>, [u32; 2])> {
    let naming = Naming::new(&[0; 32], "");
    let (mut parent, mut named) = (None, Vec::new());
    for i in first..first + blocks {
        let tokens = [i, first];
        let name = naming.next(parent.unwrap_or_else(|| naming.root(PrefixRoot::default())), &tokens, &[]);
        named.push((name, parent, tokens));
        parent = Some(name);
    }
    named
}

fn block((name, parent, tokens): &(ContentName, Option<ContentName>, [u32; 2])) -> TierBlock<'_> {
    TierBlock { name: *name, parent: *parent, tokens, root: None }
}

#[test]
fn the_end_of_the_oldest_chain_goes_first_and_pinned_slots_stay() {
    let mut index = SlotIndex::new(4, 2);
    let (old, new) = (chain(0, 2), chain(10, 3));
    for (i, entry) in old.iter().chain(&new[..2]).enumerate() {
        let (slot, evicted) = index.insert(block(entry)).unwrap();
        assert_eq!((evicted, index.find(block(entry))), (None, None), "not found before it is filled");
        index.fill(slot, i as u64);
        assert_eq!(index.find(block(entry)), Some(slot));
    }
    let (slot, evicted) = index.insert(block(&new[2])).unwrap();
    assert_eq!(evicted, Some(old[1].0), "the second block of the older chain");
    index.check(1).unwrap();
    index.fill(slot, 5);
    let first = index.find(block(&old[0])).unwrap();
    index.pin(first);
    let others = chain(20, 3);
    let (slot, evicted) = index.insert(block(&others[0])).unwrap();
    assert_eq!(evicted, Some(new[2].0));
    index.fill(slot, 6);
    assert_eq!(index.remove(first), None, "it is pinned");
    index.unpin(first);
    assert_eq!(index.remove(first), Some(old[0].0));
    index.check(0).unwrap();
}

#[test]
fn a_restored_index_knows_what_was_found_once() {
    let named = chain(0, 3);
    let header = |i: usize| {
        let (name, parent, tokens) = named[i];
        SlotHeader { name, parent, tokens: tokens.to_vec(), checksum: i as u64 }
    };
    // A child before its parent, a block twice, a slot twice, and slots and blocks of another size.
    let longer = SlotHeader { tokens: vec![0; 3], ..header(2) };
    let found = [(3, header(1)), (0, header(0)), (1, header(0)), (0, header(2)), (9, header(2)), (2, longer)];
    let mut index = SlotIndex::restored(4, 2, found);
    index.check(0).unwrap();
    assert_eq!((index.used(), index.find(block(&named[0])), index.find(block(&named[1]))), (2, Some(0), Some(3)));
    assert_eq!(index.header(3), Some(header(1)));
    for expected in [None, None, Some(named[1].0), Some(named[0].0)] {
        let others = chain(100 + index.now as u32, 1);
        let (slot, evicted) = index.insert(block(&others[0])).unwrap();
        assert_eq!(evicted, expected);
        index.pin(slot);
        index.fill(slot, 0);
    }
}

#[test]
fn a_name_with_other_tokens_or_another_parent_is_not_found() {
    let mut index = SlotIndex::new(2, 2);
    let named = chain(0, 2);
    let (slot, _) = index.insert(block(&named[1])).unwrap();
    index.fill(slot, 1);
    let (name, parent, tokens) = named[1];
    assert_eq!(index.find(TierBlock { name, parent, tokens: &tokens, root: None }), Some(slot));
    assert_eq!(index.find(TierBlock { name, parent: None, tokens: &tokens, root: None }), None);
    assert_eq!(index.find(TierBlock { name, parent, tokens: &[9, 9], root: None }), None);
}
