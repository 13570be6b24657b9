// Times an installed MPI's collectives on f32 like `megatron bench collectives`: best batch, size of the
// larger buffer. Prints `operation bytes µs` per line. Run by collectives.sh, or by hand:
//     mpicc -O2 collectives_mpi.c -o collectives_mpi && mpirun -n RANKS ./collectives_mpi SECONDS
//     BYTES...
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCHES = 5, FIRST_BATCH = 3, GROWTH = 4 };
static int rank, ranks, part;
static float *whole, *other, *share;

static void all_reduce(void) {
    MPI_Allreduce(MPI_IN_PLACE, whole, part * ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
static void all_gather(void) {
    MPI_Allgather(share, part, MPI_FLOAT, whole, part, MPI_FLOAT, MPI_COMM_WORLD);
}
static void reduce_scatter(void) {
    MPI_Reduce_scatter_block(whole, share, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
static void all_to_all(void) {
    MPI_Alltoall(whole, part, MPI_FLOAT, other, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void there_and_back(void) {
    int count = part * ranks;
    if (rank == 0) {
        MPI_Send(whole, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(whole, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(whole, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(whole, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
    }
}

// Seconds per call: the smallest mean of the batches that fill `seconds` on rank 0.
static double fastest(void (*call)(void), double seconds) {
    double start;
    int calls = FIRST_BATCH;
    // The first calls are slower than later ones, so batches grow until one is nearly long enough.
    for (;;) {
        MPI_Barrier(MPI_COMM_WORLD);
        start = MPI_Wtime();
        for (int i = 0; i < calls; i++) call();
        int wanted = seconds / BATCHES / (MPI_Wtime() - start) * calls;
        MPI_Bcast(&wanted, 1, MPI_INT, 0, MPI_COMM_WORLD);
        int enough = wanted <= calls * GROWTH;
        calls = !enough ? calls * GROWTH : wanted > 1 ? wanted : 1;
        if (enough) break;
    }
    double best = 1e9;
    for (int batch = 0; batch < BATCHES; batch++) {
        MPI_Barrier(MPI_COMM_WORLD);
        start = MPI_Wtime();
        for (int i = 0; i < calls; i++) call();
        double mean = (MPI_Wtime() - start) / calls;
        if (mean < best) best = mean;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return best;
}

int main(int argc, char **argv) {
    struct {
        const char *name;
        void (*call)(void);
        double scale;
    } operations[] = {{"all_reduce", all_reduce, 1}, {"all_gather", all_gather, 1},
        {"reduce_scatter", reduce_scatter, 1}, {"all_to_all", all_to_all, 1},
        {"send/recv", there_and_back, 0.5}};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    double seconds = atof(argv[1]);
    for (int i = 2; i < argc; i++) {
        long size = atol(argv[i]);
        part = (size + 4L * ranks - 1) / (4L * ranks);
        // Written, so that the pages are committed.
        whole = memset(malloc(4L * part * ranks), 1, 4L * part * ranks);
        other = memset(malloc(4L * part * ranks), 1, 4L * part * ranks);
        share = memset(malloc(4L * part), 1, 4L * part);
        memset(whole, 0, 4L * part * ranks);
        for (int o = 0; o < 5; o++) {
            double took = fastest(operations[o].call, seconds) * operations[o].scale;
            if (rank == 0)
                printf("%s %ld %f\n", operations[o].name, size, took * 1e6), fflush(stdout);
        }
        free(whole);
        free(other);
        free(share);
    }
    MPI_Finalize();
    return 0;
}
