//! The forms that engines read.

use kv_paged::{
    CsrBuffers, DenseStrides, GroupId, LayerGroup, Listed, PAD_SLOT, PlanError, Planner,
    PlannerConfig, Request, SequenceId,
};

const FULL: GroupId = GroupId(0);
const WINDOW: GroupId = GroupId(1);

/// A full group and a window of 4 tokens, blocks of 4; sequences of 6, 0 and 12 tokens.
fn planner() -> (Planner, [SequenceId; 3]) {
    let groups = vec![LayerGroup::full(1, 20), LayerGroup::sliding(1, 20, 4, 0)];
    let config = PlannerConfig::new(groups, 4, 16).and_then(|c| c.with_block_size(4)).unwrap();
    let mut planner = Planner::new(config);
    let ids = [6, 0, 12].map(|len: u32| {
        let id = planner.create(&Request { prompt: &[], max_tokens: 16, salt: 0 }).unwrap().id;
        let tokens: Vec<u32> = (0..len).map(|position| 100 * len + position).collect();
        planner.append(id, &tokens).unwrap();
        planner.commit(id, len).unwrap();
        id
    });
    (planner, ids)
}

#[test]
fn the_dense_table_has_a_row_for_each_sequence_and_a_null_row_for_padding() {
    let (planner, [a, _, c]) = planner();
    let strides = DenseStrides { sequence: 6, group: 3 };
    let mut out = [-7_i32; 20];
    planner.write_dense(&[Some(c), None, Some(a)], 3, strides, &mut out).unwrap();
    // Sequence c has lost its first two blocks of the window group.
    assert_eq!(out[..6], [3, 4, 5, 0, 0, 5]);
    assert_eq!(out[6..12], [0; 6]);
    assert_eq!(out[12..18], [1, 2, 0, 1, 2, 0]);
    assert_eq!(out[18..], [-7; 2], "nothing behind the last row is touched");

    // One table per group, as vLLM has it, with columns to spare.
    let strides = DenseStrides { sequence: 5, group: 10 };
    let mut out = [9_u32; 20];
    planner.write_dense(&[Some(c), Some(a)], 5, strides, &mut out).unwrap();
    assert_eq!(out, [3, 4, 5, 0, 0, 1, 2, 0, 0, 0, 0, 0, 5, 0, 0, 1, 2, 0, 0, 0]);
}

#[test]
fn dense_rows_must_not_overlap_or_be_too_narrow() {
    let (planner, [a, _, c]) = planner();
    let batch = [Some(a), Some(c)];
    let mut out = [0_u32; 12];
    let mut refused = |columns, sequence, group, len: usize| {
        let strides = DenseStrides { sequence, group };
        planner.write_dense(&batch, columns, strides, &mut out[..len]).unwrap_err()
    };
    let stride =
        |what, needed_elems, got_elems| PlanError::StrideTooSmall { what, needed_elems, got_elems };
    assert_eq!(refused(2, 4, 2, 12), stride("columns", 3, 2));
    assert_eq!(refused(3, 6, 2, 12), stride("group stride", 3, 2));
    assert_eq!(refused(3, 5, 3, 12), stride("sequence stride", 6, 5));
    assert_eq!(refused(3, 3, 5, 12), stride("group stride", 6, 5));
    assert_eq!(
        refused(3, 6, 3, 11),
        PlanError::BufferTooSmall { what: "dense table", needed_elems: 12, got_elems: 11 }
    );
}

#[test]
fn page_lists_name_every_page_or_only_the_held_ones() {
    let (planner, [a, b, c]) = planner();
    let batch = [Some(a), None, Some(b), Some(c)];
    let write = |group, listed| {
        let (mut indptr, mut indices, mut last) = ([0_i32; 5], [-1_i32; 8], [-1_i32; 4]);
        let out =
            CsrBuffers { indptr: &mut indptr, indices: &mut indices, last_block_len: &mut last };
        let n = planner.write_csr(&batch, group, listed, out).unwrap();
        assert_eq!(planner.csr_indices_elems(&batch, group, listed), Ok(n));
        (indptr, indices[..n].to_vec(), last)
    };
    let last = [2, 1, 0, 4];
    assert_eq!(write(FULL, Listed::Held), ([0, 2, 3, 3, 6], vec![1, 2, 0, 3, 4, 5], last));
    assert_eq!(write(WINDOW, Listed::Logical), ([0, 2, 3, 3, 6], vec![1, 2, 0, 0, 0, 5], last));
    assert_eq!(write(WINDOW, Listed::Held), ([0, 2, 3, 3, 4], vec![1, 2, 0, 5], last));
}

#[test]
fn page_list_buffers_are_checked() {
    let (planner, [a, ..]) = planner();
    let write = |indptr: usize, indices: usize, last: usize| {
        let out = CsrBuffers {
            indptr: &mut vec![0_u32; indptr],
            indices: &mut vec![0; indices],
            last_block_len: &mut vec![0; last],
        };
        planner.write_csr(&[Some(a)], FULL, Listed::Logical, out)
    };
    let short = |what, needed_elems, got_elems| {
        Err(PlanError::BufferTooSmall { what, needed_elems, got_elems })
    };
    assert_eq!(write(1, 2, 1), short("indptr", 2, 1));
    assert_eq!(write(2, 1, 1), short("indices", 2, 1));
    assert_eq!(write(2, 2, 0), short("last_block_len", 1, 0));
    assert_eq!(write(2, 2, 1), Ok(2));
}

#[test]
fn slots_are_block_times_size_plus_offset() {
    let (planner, [a, _, c]) = planner();
    let mut out = [0; 6];
    planner.write_slots(a, FULL, 0..6, &mut out).unwrap();
    assert_eq!(out, [4, 5, 6, 7, 8, 9]);
    planner.write_slots(c, WINDOW, 6..12, &mut out).unwrap();
    assert_eq!(out, [PAD_SLOT, PAD_SLOT, 20, 21, 22, 23]);
    assert_eq!(
        planner.write_slots(a, FULL, 3..7, &mut out),
        Err(PlanError::OutOfPositions { start: 3, end: 7, len_tokens: 6 })
    );
    assert_eq!(
        planner.write_slots(a, FULL, 0..6, &mut out[..5]),
        Err(PlanError::BufferTooSmall { what: "slots", needed_elems: 6, got_elems: 5 })
    );
    assert!(planner.write_slots(a, GroupId(2), 0..1, &mut out).is_err());
}

#[test]
fn a_freed_sequence_is_refused_and_its_row_is_null() {
    let (mut planner, [a, _, c]) = planner();
    planner.free(a).unwrap();
    let mut out = [0_u32; 12];
    let strides = DenseStrides { sequence: 6, group: 3 };
    assert_eq!(
        planner.write_dense(&[Some(c), Some(a)], 3, strides, &mut out),
        Err(PlanError::UnknownSequence { sequence: a })
    );
    let row = a.row() as usize * 8;
    assert_eq!(planner.table()[row..row + 8], [0; 8]);
    let null = planner.null_row() as usize * 8;
    assert_eq!(planner.table()[null..], [0; 8]);
    assert_eq!(planner.table_bytes(), 4 * 5 * 8);
}
