// Prometheus' text format, as far as the charts need it, and percentiles of histograms between two readings.

/** name -> value, and name -> [[upper edge, count], …] for histograms; labels other than `le` are summed over. */
export function parse(text) {
  const values = new Map();
  const histograms = new Map();
  for (const line of text.split("\n")) {
    const match = line.match(/^([\w:]+)(\{[^}]*\})? ([^ ]+)/);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    const edge = labels.match(/le="([^"]+)"/);
    if (edge && name.endsWith("_bucket")) {
      const key = name.slice(0, -7);
      const buckets = histograms.get(key) ?? new Map();
      const upper = edge[1] === "+Inf" ? Infinity : Number(edge[1]);
      buckets.set(upper, (buckets.get(upper) ?? 0) + Number(value));
      histograms.set(key, buckets);
    } else {
      values.set(name, (values.get(name) ?? 0) + Number(value));
    }
  }
  return { values, histograms };
}

/** The `share` quantile, in the unit of the edges, of what came between two readings; null when nothing did. */
export function quantile(before, after, share) {
  if (!after) return null;
  const edges = [...after.keys()].sort((a, b) => a - b);
  const counts = edges.map((edge) => after.get(edge) - (before?.get(edge) ?? 0));
  const total = counts[counts.length - 1];
  if (!(total > 0)) return null;
  const rank = share * total;
  const index = counts.findIndex((count) => count >= rank);
  const low = index ? edges[index - 1] : 0;
  if (edges[index] === Infinity) return low;
  const under = index ? counts[index - 1] : 0;
  return low + ((edges[index] - low) * (rank - under)) / Math.max(1e-9, counts[index] - under);
}
