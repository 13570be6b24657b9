//! Where the parameters of one rank lie in its buckets: arithmetic, without any memory.

use super::{ParamId, ParamSpec, Placement, Placements, Role};

/// Where one rank's parameters lie in its buckets. All ranks of a pipeline stage have the same
/// layout.
#[derive(Clone, Debug)]
pub struct BucketLayout {
    /// Parameters in forward order.
    pub params: Vec<PlacedParam>,
    /// Buckets in the order in which backward completes them.
    pub buckets: Vec<PlacedBucket>,
}

/// A parameter's place in a bucket.
#[derive(Clone, Debug)]
pub struct PlacedParam {
    /// The layout-independent description.
    pub spec: ParamSpec,
    /// Whether it is the primary, a copy or a second use of a weight.
    pub role: Role,
    /// Index of the bucket that holds it; for [`Role::TiedUse`], the primary's.
    pub bucket: usize,
    /// First element in the bucket; for [`Role::TiedUse`], the primary's.
    pub offset: usize,
    /// Elements of one rank's share, padding included.
    pub numel: usize,
}

/// A bucket without its memory; see [`Bucket`](super::Bucket).
#[derive(Clone, Debug)]
pub struct PlacedBucket {
    /// As [`Bucket::params`](super::Bucket::params).
    pub params: Vec<ParamId>,
    /// As [`Bucket::len`](super::Bucket::len).
    pub len: usize,
    /// As [`Bucket::tied`](super::Bucket::tied).
    pub tied: bool,
}

/// Elements of a rank's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementCounts {
    /// In the model's dtype.
    pub weights: usize,
    /// Main gradients.
    pub gradients: usize,
}

impl BucketLayout {
    /// Elements of all buckets.
    pub fn len(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.len).sum()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// What a rank holds in its device's memory at most during a step: all elements of a buffer that
    /// is replicated; of one that is sharded its shard, unless that is kept elsewhere, and two whole
    /// units, of which a tied embedding is one. `here` tells of weights and of gradients whether
    /// shards are kept on the device.
    pub fn elements(
        &self,
        placements: Placements,
        num_shards: usize,
        here: [bool; 2],
    ) -> ElementCounts {
        let of = |placement, here, whole| match placement {
            Placement::Replicated => self.len(),
            Placement::Sharded if here => self.len() / num_shards + whole,
            Placement::Sharded => whole,
        };
        let lens = |tied: bool| self.buckets.iter().filter(move |b| b.tied == tied).map(|b| b.len);
        let largest = |lens: Vec<usize>, count: usize| -> usize {
            let mut lens = lens;
            lens.sort_unstable_by(|a, b| b.cmp(a));
            lens.iter().take(count).sum()
        };
        let tied: Vec<usize> = lens(true).collect();
        let others = largest(lens(false).collect(), 2usize.saturating_sub(tied.len()));
        ElementCounts {
            weights: of(
                placements.weights,
                here[0],
                largest(lens(true).chain(lens(false)).collect(), 2),
            ),
            // A tied embedding's gradient is whole until the step's end.
            gradients: of(placements.gradients, here[1], tied.iter().sum::<usize>() + others),
        }
    }
}

/// What a bucket holds at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketLimit {
    /// It is closed once it has this many elements.
    Elements(usize),
    /// The parameters of one unit: of a layer, of the input, of the output. What is sharded is
    /// gathered and reduced by unit.
    Unit {
        /// Vectors have a bucket apart from matrices: where the gradients of weights are delayed,
        /// those of vectors are complete before.
        vectors_apart: bool,
    },
}

impl BucketLimit {
    /// Units where gradients, or weights too, are sharded; `elements` otherwise.
    pub fn of(placements: Placements, elements: usize, delays_weight_gradients: bool) -> Self {
        match placements.gradients {
            Placement::Sharded => Self::Unit { vectors_apart: delays_weight_gradients },
            Placement::Replicated => Self::Elements(elements),
        }
    }
}

/// Collects the parameters of the layers of one rank in forward order.
#[derive(Debug, Default)]
pub struct ParamsBuilder {
    declared: Vec<Declared>,
    chunk: usize,
}

#[derive(Debug)]
struct Declared {
    spec: ParamSpec,
    role: Role,
    chunk: usize,
    /// The unit that uses it first, if any was named.
    unit: Option<usize>,
}

/// Every parameter starts at a multiple of this many elements. This keeps SIMD and NCCL ranges
/// aligned (Megatron uses the same value).
const ALIGN: usize = 64;

impl ParamsBuilder {
    /// Starts the next chunk, to which later declarations belong. A bucket never spans chunks.
    pub fn next_chunk(&mut self) {
        self.chunk += 1;
    }

    /// Declares a parameter that this rank holds.
    pub fn declare(&mut self, spec: ParamSpec) -> ParamId {
        self.push(spec, Role::Primary)
    }

    /// Declares a further use of a tied weight. If the first use is on this rank, both share the
    /// storage. Otherwise this rank keeps a copy.
    pub fn declare_tied(&mut self, spec: ParamSpec) -> ParamId {
        let is_first = |d: &Declared| d.spec.name == spec.name && d.role == Role::Primary;
        let primary = self.declared.iter().position(is_first);
        let role = primary.map_or(Role::TiedCopy, |at| Role::TiedUse(ParamId(at)));
        self.push(spec, role)
    }

    fn push(&mut self, spec: ParamSpec, role: Role) -> ParamId {
        self.declared.push(Declared { spec, role, chunk: self.chunk, unit: None });
        ParamId(self.declared.len() - 1)
    }

    /// Names the units of the parameters declared so far: for each, the parameters that its layer
    /// uses. A parameter belongs to the first unit that names it.
    pub fn set_units(&mut self, units: impl IntoIterator<Item = Vec<ParamId>>) {
        for (unit, params) in units.into_iter().enumerate() {
            for ParamId(at) in params {
                self.declared[at].unit.get_or_insert(unit);
            }
        }
    }

    /// A parameter that no unit names, if there is one.
    pub(super) fn without_unit(&self) -> Option<&ParamSpec> {
        self.declared.iter().find(|declared| declared.unit.is_none()).map(|d| &d.spec)
    }

    /// The parameters declared so far, in forward order, without second uses of tied weights.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        let own = self.declared.iter().filter(|d| !matches!(d.role, Role::TiedUse(_)));
        own.map(|declared| &declared.spec)
    }

    /// Places the parameters declared so far in buckets; allocates nothing. `tp` ranks share each
    /// layer, `replicas` hold the same parameters: a bucket's length is divisible by their number.
    pub fn place(&self, limit: BucketLimit, replicas: usize, tp: usize) -> BucketLayout {
        let pad = |n: usize, to: usize| n.div_ceil(to) * to;
        let mut buckets: Vec<PlacedBucket> = Vec::new();
        // What each bucket's parameters have in common.
        let mut kinds: Vec<(usize, Option<usize>, bool)> = Vec::new();
        let mut places = vec![(0, 0); self.declared.len()];
        let numel = |spec: &ParamSpec| spec.local_shape(tp).iter().product::<usize>();
        for (at, Declared { spec, role, chunk, unit }) in self.declared.iter().enumerate().rev() {
            if matches!(role, Role::TiedUse(_)) {
                continue;
            }
            let tied = spec.tie_group.is_some();
            let kind = match limit {
                BucketLimit::Elements(_) => (*chunk, None, false),
                BucketLimit::Unit { vectors_apart } => {
                    (*chunk, *unit, vectors_apart && spec.shape.len() == 1)
                }
            };
            let has_room = |at: &usize| match limit {
                BucketLimit::Elements(limit) => buckets[*at].len < limit,
                BucketLimit::Unit { .. } => true,
            };
            let open = (0..buckets.len())
                .rev()
                .find(|at| kinds[*at] == kind && !buckets[*at].tied)
                .filter(|at| !tied && has_room(at));
            let index = open.unwrap_or_else(|| {
                buckets.push(PlacedBucket { params: vec![], len: 0, tied });
                kinds.push(kind);
                buckets.len() - 1
            });
            let bucket = &mut buckets[index];
            places[at] = (index, bucket.len);
            bucket.params.push(ParamId(at));
            bucket.len = pad(bucket.len + numel(spec), ALIGN);
        }
        for bucket in &mut buckets {
            bucket.len = pad(bucket.len, replicas * ALIGN);
        }
        let params = self.declared.iter().enumerate().map(|(at, Declared { spec, role, .. })| {
            let (bucket, offset) = if let Role::TiedUse(ParamId(primary)) = role {
                places[*primary]
            } else {
                places[at]
            };
            PlacedParam { spec: spec.clone(), role: *role, bucket, offset, numel: numel(spec) }
        });
        BucketLayout { params: params.collect(), buckets }
    }
}
