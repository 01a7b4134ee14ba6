//! Any numbers as a block table: accepted if and only if each layer is a permutation.
#![no_main]

use std::collections::HashSet;

use kv_paged::{BlockTable, KvCoord, KvPart, KvType, PagedKvConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[n_layer, n_kv_head, head_dim, context, block, kv_type], rest)) =
        data.split_first_chunk()
    else {
        return;
    };
    let kv_type = KvType::ALL[usize::from(kv_type) % KvType::ALL.len()];
    // Small shapes, where tables are accepted, or (context 255) ones at the edge of what numbers hold.
    let config = if context == u8::MAX {
        let wide = |byte: u8| u32::from(byte) << (byte % 25);
        PagedKvConfig::new(wide(n_layer), wide(n_kv_head), wide(head_dim), wide(block))
    } else {
        PagedKvConfig::new(
            u32::from(n_layer) % 4,
            u32::from(n_kv_head) % 4,
            u32::from(head_dim) % 40,
            u32::from(context) % 40,
        )
        .and_then(|config| config.with_block_size(u32::from(block) % 8))
    };
    let Ok(config) = config.and_then(|config| config.with_kv_type(kv_type)) else { return };
    if config.table_entries() > 1 << 10 {
        return;
    }

    let entries: Vec<u32> =
        rest.iter().map(|&byte| if byte == 255 { u32::MAX } else { byte.into() }).collect();
    let blocks = config.blocks_per_layer();
    let expected = entries.len() as u64 == config.table_entries()
        && entries.chunks(blocks as usize).all(|layer| {
            let named: HashSet<u32> = layer.iter().copied().collect();
            named.len() == layer.len() && layer.iter().all(|&entry| entry < blocks)
        });
    let table = BlockTable::from_permutation(&config, entries.clone());
    assert_eq!(table.is_ok(), expected, "{config:?} {entries:?} {table:?}");
    let table = table.unwrap_or_else(|_| BlockTable::identity(&config));
    places(&config, &table);
});

/// Every slot of every layer has a place of its own inside the cache.
fn places(config: &PagedKvConfig, table: &BlockTable) {
    let layout = config.layout();
    let mut elems = HashSet::new();
    for layer in 0..config.n_layer() {
        for slot in 0..config.max_context_tokens().min(64) {
            let (block, token) = table.locate(layer, slot).expect("a slot of the context");
            let at = KvCoord { layer, block, part: KvPart::Key, head: 0, token, dim: 0 };
            let elem = layout.elem_index(at).expect("a place inside");
            let end_bytes = (elem + 1) * config.kv_type().elem_bytes();
            assert!(end_bytes <= layout.total_bytes() && elems.insert(elem), "{at:?}");
        }
    }
}
